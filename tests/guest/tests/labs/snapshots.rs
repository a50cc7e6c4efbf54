//! Snapshots: a guest that was saved and restored counts as one that was not, and what cannot be continued is refused.
//! One host for all of them, some 12 guests and 30 restored ones: four minutes of a core.

use std::collections::BTreeSet;

use guest_images::Suite;
use guest_tests::host::{self, Host};
use guest_tests::lab::{OnEachHost, SAVED_GUESTS, StepOutput, Steps, with_installed_kernel};
use guest_tests::programs::{TRACK, TRACK_INSTRUCTIONS};
use guest_tests::suite::{Test, second_tier};
use guest_tests::tests;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    let first = tests![
        over_ten_snapshots_no_count_and_no_sample_is_lost_or_made_up,
        time_between_is_told_to_the_clock_and_not_to_events,
        a_guest_that_goes_on_and_two_restored_ones_have_different_random_numbers_and_boot_ids,
        what_cannot_be_saved_or_restored_is_one_line,
        a_full_disk_leaves_nothing_and_the_guest_goes_on,
    ];
    let second = second_tier(tests![
        every_pmu_counts_over_snapshots,
        vcpus_count_separately_over_snapshots,
        the_commands_input_and_status_go_on,
        open_files_of_shares_are_open_again,
        a_disk_must_be_as_it_was,
        the_console_of_a_guest_without_a_command_goes_on,
        with_fewer_free_counters_the_policy_decides,
        a_signal_leaves_nothing_half_written,
        a_newer_kernel_sees_another_vm_generation_id,
        the_system_calls_are_those_of_the_sandbox,
    ]);
    first.into_iter().chain(second).collect()
}

/// Instructions between two samples: no multiple of the loop's length, so that the samples are at different
/// instructions.
const PERIOD: u64 = 1_000_003;
/// Number of snapshots in a chain.
const SNAPSHOTS: usize = 10;
/// Seconds between a snapshot and its restoring.
const GAP: u64 = 3;
/// PMUs of an AMD host beside the default one.
const PMUS: [&str; 3] = ["amd-legacy", "intel", "intel-v2"];

static RESULTS: OnEachHost = OnEachHost::new(|| {
    // The clock is looked at before and after both.
    let measure = format!(
        "echo ready; date +%s; perf stat -x, -e instructions:u,task-clock ./track 2>&1; \
         perf record -q -o /tmp/data -e instructions:u -c {PERIOD} ./track; \
         perf script -i /tmp/data -F ip | grep . >/tmp/samples; wc -l </tmp/samples; sha256sum </tmp/samples; date +%s; exit 7"
    );
    let chain = |name: &str, snapshots: usize, gap: u64, arguments: &str| {
        format!("{SAVED_GUESTS} chain {name} {snapshots} {gap} {arguments}")
    };
    let steps = Steps::new("snapshots")
        .in_guest("track", TRACK)
        .in_guest("measure", measure.into_bytes())
        .step("undisturbed", &chain("undisturbed", 0, 0, "-- sh ./measure"))
        .step("ten", &chain("ten", SNAPSHOTS, GAP, "-- sh ./measure"))
        .step(
            "fork",
            &format!(
                "{SAVED_GUESTS} ./tally run --name fork -- sh -c 'cd /proc/sys/kernel/random; cat boot_id; echo ready; sleep 2; \
                 head -c 16 /dev/urandom | od -An -tx1; cat uuid boot_id' >fork.said & vm=$!; said fork.said; ./tally snapshot fork fork.saved; \
                 wait $vm; echo $?; cat fork.said; ls -s fork.saved; for again in 1 2; do ./tally run --restore fork.saved; done"
            ),
        )
        .step(
            "refused",
            &format!(
                "{SAVED_GUESTS} restore() {{ ./tally run \"$@\"; echo \"status $?\" >&2; }}
                 ./tally run --name graph --flamegraph out.svg -- sleep 3 & graph=$!; up graph; ./tally snapshot graph graph.saved; \
                 ./tally snapshot nobody nobody.saved; ./tally snapshot graph .; kill $graph; wait $graph; \
                 ./tally run --name kvm --pmu kvm -- sleep 3 & kvm=$!; up kvm; ./tally snapshot kvm kvm.saved; kill $kvm; wait $kvm; \
                 ls -d *.saved; \
                 cp -r fork.saved older; sed -i '1s/\"tally-snapshot\":1/\"tally-snapshot\":9/' older/state; restore --restore older; rm -r older; \
                 cp -r fork.saved short; truncate -s 500M short/memory; restore --restore short; rm -r short; \
                 cp -r fork.saved edited; printf x | dd of=edited/memory bs=1 seek=1M conv=notrunc 2>/dev/null; \
                 restore --restore edited; rm -r edited; restore --restore none; restore --restore fork.saved --memory 1G -- true; rm -r fork.saved"
            ),
        )
        .step(
            "full",
            &format!(
                "{SAVED_GUESTS} mkdir small; mount -t tmpfs -o size=20M none small; \
                 ./tally run --name full -- sh -c 'echo ready; sleep 2; echo done' >full.said & vm=$!; said full.said; \
                 ./tally snapshot full small/saved; echo $?; ls -a small | wc -l; wait $vm; cat full.said"
            ),
        );
    steps.second_tier(second).run()
});

fn second(steps: Steps) -> Steps {
    let chain = |name: &str, snapshots: usize, arguments: &str| {
        format!("{SAVED_GUESTS} chain {name} {snapshots} 0 {arguments}")
    };
    let count = "sh -c 'echo ready; perf stat -x, -e instructions:u,branches:u ./track 2>&1'";
    // Each writes a file of its own: lines of two writers to one stream may be mixed.
    let both = "sh -c 'echo ready; for cpu in 0 1; do taskset -c $cpu perf stat -x, -o $cpu -e instructions:u ./track & done; \
                wait; cat 0 1'";
    let steps = PMUS
        .into_iter()
        .fold(steps, |steps, pmu| steps.step(pmu, &chain(pmu, 3, &format!("--pmu {pmu} -- {count}"))));
    with_installed_kernel(steps, "newer", Suite::Trixie)
        .step("vcpus", &chain("vcpus", 4, &format!("--cpus 2 -- {both}")))
        .step(
            "input",
            &format!(
                "{SAVED_GUESTS} (echo one; sleep 5) | ./tally run --name input -- sh -c 'echo ready; read line; echo $line; read line; \
                 echo $line; exit 3' >input.said & said input.said; sleep 0.5; ./tally snapshot input input.saved; \
                 echo two | ./tally run --restore input.saved; echo $?; cat input.said; rm -r input.saved"
            ),
        )
        .step(
            "share",
            &format!(
                "{SAVED_GUESTS} mkdir shared; echo first >shared/read; cd shared; \
                 ../tally run --name share --share .:rw -- sh -c 'exec 3<read 4>>written; cd /scenario/shared; read line <&3; echo ready; \
                 sleep 2; cat <&3; echo $line >&4; cat written; pwd; ls' >../share.said & vm=$!; cd ..; said share.said; \
                 ./tally snapshot share share.saved --stop; wait $vm; echo second >>shared/read; ./tally run --restore share.saved; \
                 mv shared/read shared/gone; ./tally run --restore share.saved; echo $?; rm -r share.saved"
            ),
        )
        .step(
            "disk",
            &format!(
                "{SAVED_GUESTS} truncate -s 1M image; echo before | dd of=image conv=notrunc 2>/dev/null; \
                 ./tally run --name disk --disk image -- sh -c 'echo ready; sleep 2; head -n 1 /dev/vda; echo after >/dev/vda; sync' \
                 >disk.said & vm=$!; said disk.said; ./tally snapshot disk disk.saved --stop; wait $vm; cp image copy; \
                 ./tally run --restore disk.saved; head -n 1 image; ./tally run --restore disk.saved; echo $?; \
                 ./tally run --restore disk.saved --disk copy; head -n 1 copy; rm -r disk.saved"
            ),
        )
        .step(
            "console",
            &format!(
                "{SAVED_GUESTS} (sleep 4; echo 'echo rea''dy'; sleep 6) | ./tally run --name console --kernel guest/kernel --initrd guest/initrd \
                 >console.said & said console.said; ./tally snapshot console console.saved --stop; \
                 (sleep 0.5; echo 'echo con''tinued; poweroff -f') | ./tally run --restore console.saved; echo $?; rm -r console.saved"
            ),
        )
        .step(
            "fewer",
            &format!(
                "{SAVED_GUESTS} ./tally run --name fewer -- sh -c 'echo ready; sleep 2; perf stat -x, -e instructions:u /lib/tally/loop' \
                 >fewer.said & vm=$!; said fewer.said; ./tally snapshot fewer fewer.saved --stop; wait $vm; \
                 perf stat -a -e instructions:D,branches:D -o /dev/null sleep 100 & thief=$!; sleep 0.5; \
                 ./tally run --restore fewer.saved --on-starvation stop; echo $?; ./tally run --restore fewer.saved; echo $?; kill $thief; rm -r fewer.saved"
            ),
        )
        .step(
            "signal",
            &format!(
                "{SAVED_GUESTS} mkdir here; ./tally run --name signal -- sh -c 'echo ready; sleep 3; echo done' >signal.said & vm=$!; \
                 said signal.said; for delay in 0 0.05 0.1 0.15; do ./tally snapshot signal here/saved & saver=$!; sleep $delay; \
                 kill -TERM $saver; wait $saver; [ -d here/saved ] || ls -A here; rm -rf here/saved; done; wait $vm; cat signal.said"
            ),
        )
        .step(
            "generation",
            &format!(
                "{SAVED_GUESTS} ./tally run --name generation --kernel newer/boot/vmlinuz -- sh -c 'echo ready; sleep 2; dmesg' \
                 >generation.said & vm=$!; said generation.said; ./tally snapshot generation generation.saved --stop; wait $vm; \
                 ./tally run --restore generation.saved; rm -r generation.saved"
            ),
        )
        .step(
            "confined",
            &format!(
                "{SAVED_GUESTS} dmesg -c >/dev/null; mkdir confined; chain confined 2 0 --sandbox log --share confined -- {count}; dmesg | grep -c type=1326"
            ),
        )
}

/// Returns the counts of an event in what perf stat prints with `-x,`.
fn counts<'a>(text: &'a str, event: &str) -> Vec<&'a str> {
    let is_of = |line: &&str| line.contains(&format!(",{event},"));
    text.lines().filter(is_of).map(|line| line.split(',').next().unwrap_or_default()).collect()
}

/// The parts of what `measure` prints.
struct Measured {
    begun: u64,
    ended: u64,
    instructions: String,
    /// Of the first program, in milliseconds.
    task_clock: f64,
    samples: String,
}

impl Measured {
    fn of(done: &StepOutput) -> Self {
        assert_eq!(done.status, 7, "{}{}", done.text(), done.err);
        let text = done.text();
        let time = |line: Option<&str>| line.and_then(|line| line.parse().ok()).expect("a time");
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 7, "{text}{}", done.err);
        Self {
            begun: time(lines.get(1).copied()),
            ended: time(lines.last().copied()),
            instructions: counts(&text, "instructions:u").concat(),
            task_clock: counts(&text, "task-clock").concat().parse().expect("a time"),
            samples: lines[4..6].join(" "),
        }
    }
}

fn over_ten_snapshots_no_count_and_no_sample_is_lost_or_made_up() {
    let (undisturbed, ten) = (Measured::of(RESULTS.of("undisturbed")), Measured::of(RESULTS.of("ten")));
    assert_eq!(ten.instructions, TRACK_INSTRUCTIONS.to_string());
    // Their number and their addresses, in their order.
    assert!(ten.samples.starts_with(&format!("{} ", TRACK_INSTRUCTIONS / PERIOD)), "{}", ten.samples);
    assert_eq!(ten.samples, undisturbed.samples);
}

fn time_between_is_told_to_the_clock_and_not_to_events() {
    let (undisturbed, ten) = (Measured::of(RESULTS.of("undisturbed")), Measured::of(RESULTS.of("ten")));
    assert!(ten.ended - ten.begun >= SNAPSHOTS as u64 * GAP, "{} to {}", ten.begun, ten.ended);
    // Less than one of the gaps.
    let longer = ten.task_clock - undisturbed.task_clock;
    assert!(longer < 1000.0, "{} and {} ms", ten.task_clock, undisturbed.task_clock);
}

fn a_guest_that_goes_on_and_two_restored_ones_have_different_random_numbers_and_boot_ids() {
    let done = RESULTS.of("fork");
    let text = done.text();
    let drawn: Vec<&str> = text.lines().filter(|line| line.len() > 30).collect();
    // Of three guests two numbers and the ID of the boot, which the first one has read before, too.
    assert_eq!((drawn.len(), drawn.iter().collect::<BTreeSet<_>>().len()), (10, 9), "{text}{}", done.err);
}

fn what_cannot_be_saved_or_restored_is_one_line() {
    let done = RESULTS.of("refused");
    let said: Vec<&str> = done
        .err
        .lines()
        .filter(|line| !line.contains("No such file or directory") || line.contains("none"))
        .collect();
    let expected = [
        "says: a run with --flamegraph cannot be saved",
        "no VM `nobody` runs here",
        "tally: .: it exists already",
        "says: the counters of --pmu kvm cannot be saved",
        "--restore older: state: a snapshot of version 9: this Tally continues those of version 1",
        "status 125",
        "--restore short: memory: damaged: it is not what was saved",
        "status 125",
        "--restore edited: memory: damaged: it is not what was saved",
        "status 125",
        "--restore none: state: No such file or directory",
        "status 125",
        "'--restore <DIR>' cannot be used with",
        "status 125",
    ];
    assert_eq!(said.len(), expected.len(), "{}", done.err);
    for (said, expected) in said.iter().zip(expected) {
        assert!(said.contains(expected), "{said}\n{expected}");
    }
    assert_eq!(done.text(), "fork.saved\n", "nothing was made");
}

fn a_full_disk_leaves_nothing_and_the_guest_goes_on() {
    let done = RESULTS.of("full");
    assert_eq!(done.text(), "125\n2\nready\ndone\n", "{}", done.err);
    assert!(done.err.contains("small/saved: No space left on device"), "{}", done.err);
}

fn every_pmu_counts_over_snapshots() {
    for pmu in PMUS {
        let done = RESULTS.of(pmu);
        let text = done.text();
        assert_eq!(
            counts(&text, "instructions:u"),
            [TRACK_INSTRUCTIONS.to_string()],
            "{pmu}: {text}{}",
            done.err
        );
        assert_eq!(counts(&text, "branches:u").len(), 1, "{pmu}: {text}");
    }
}

fn vcpus_count_separately_over_snapshots() {
    let done = RESULTS.of("vcpus");
    let text = done.text();
    assert_eq!(
        counts(&text, "instructions:u"),
        vec![TRACK_INSTRUCTIONS.to_string(); 2],
        "{text}{}",
        done.err
    );
}

fn the_commands_input_and_status_go_on() {
    let done = RESULTS.of("input");
    assert_eq!(done.text(), "two\n3\nready\none\n", "{}", done.err);
}

fn open_files_of_shares_are_open_again() {
    let done = RESULTS.of("share");
    let expected = "second\nfirst\n/scenario/shared\nread\nwritten\n125\n";
    assert_eq!(done.text(), expected, "{}", done.err);
    assert!(
        done.err.contains("the guest has read of a share open, and here it cannot be opened"),
        "{}",
        done.err
    );
}

fn a_disk_must_be_as_it_was() {
    let done = RESULTS.of("disk");
    assert_eq!(done.text(), "before\nafter\n125\nbefore\nafter\n", "{}", done.err);
    assert!(done.err.contains("a disk has changed since the guest was saved"), "{}", done.err);
}

fn the_console_of_a_guest_without_a_command_goes_on() {
    let done = RESULTS.of("console");
    assert!(
        done.text().contains("continued\r\n") && done.text().ends_with("0\n"),
        "{}{}",
        done.text(),
        done.err
    );
}

fn with_fewer_free_counters_the_policy_decides() {
    let done = RESULTS.of("fewer");
    assert_eq!(done.text(), "125\n0\n", "{}", done.err);
    let says = |text: &str| assert!(done.err.contains(text), "{text}: {}", done.err);
    // The thief has a fixed counter of Intel's and a general one; the other fixed ones cannot be told from none.
    let (has, free) = if host::current() == Host::Intel { (11, 7) } else { (6, 4) };
    says(&format!("the guest has {has} counters, and this host has {free} free"));
    says("its policy's on-starvation is `stop`");
    says("some of them may stand still");
    assert_eq!(counts(&done.err, "instructions:u"), ["20000004"], "{}", done.err);
}

fn a_signal_leaves_nothing_half_written() {
    let done = RESULTS.of("signal");
    assert_eq!(done.text(), "ready\ndone\n", "{}", done.err);
}

fn a_newer_kernel_sees_another_vm_generation_id() {
    let done = RESULTS.of("generation");
    let reseeded = done.text().matches("crng reseeded due to virtual machine fork").count();
    assert_eq!(reseeded, 1, "{}{}", done.text(), done.err);
}

fn the_system_calls_are_those_of_the_sandbox() {
    let done = RESULTS.of("confined");
    assert!(done.text().ends_with("\n0\n"), "{}{}", done.text(), done.err);
}
