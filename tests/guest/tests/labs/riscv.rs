//! Guests on a RISC-V host: that they run, and what they count, beside the host itself and KVM's own virtual PMU.
//!
//! All that is in this file is one boot of the simulated host. What Linux promises of its counters is tested with `features`.

mod booting;
mod ending;
mod older_host;
mod refusals;

use std::sync::LazyLock;

use guest_images::Suite;
use guest_images::payloads::LOOP_INSTRUCTIONS;
use guest_images::payloads::riscv64::{LOOP, LOOP_BRANCHES, LOOP_START};
use guest_tests::lab::{Results, Steps, with_installed_kernel};
use guest_tests::perf::{Count, STAT, Value, counts};
use guest_tests::suite::{Test, second_tier};
use guest_tests::tests;

/// The tests of this module and those below it.
pub fn tests() -> Vec<Test> {
    let below = [booting::tests, ending::tests, older_host::tests, refusals::tests];
    below.into_iter().flat_map(|tests| tests()).chain(own()).collect()
}

/// The tests of this file.
fn own() -> Vec<Test> {
    [
        tests![
            a_guest_counts_and_samples_what_the_host_does,
            what_was_changed_in_the_kernel_is_told,
            the_base_pmu_counts_and_is_refused_sampling,
            without_a_pmu_nothing_is_counted,
            a_guest_has_folders_and_ends_with_its_commands_status,
            the_host_tells_the_guests_work_from_that_for_it,
        ],
        second_tier(tests![
            the_newest_kernel_is_a_guest_as_well,
            two_vcpus_count_at_the_same_time,
            kvms_own_pmu_counts_the_same,
        ]),
    ]
    .concat()
}

/// How far apart samples are.
const PERIOD: u64 = 19_998;
/// An even number, as the loop has two instructions: samples are of the same.
const _: () = assert!(PERIOD.is_multiple_of(2));

/// Counts a loop by events of all kinds, and samples it.
fn measure() -> String {
    format!(
        "{STAT} -e instructions:u,cycles:u,branches:u,r2:u,r15:u $1 2>&1
        perf record -q -e instructions:u -c {PERIOD} -o /tmp/data $1
        perf script -i /tmp/data -F ip | sort | uniq -c"
    )
}

/// What that is to say.
fn measured(text: &str) {
    let values: Vec<u64> = counts(text).iter().map(Count::exact).collect();
    let (all, branches) = (LOOP_INSTRUCTIONS, LOOP_BRANCHES);
    assert_eq!(values, [all, all, branches, all, branches], "{text}");
    let samples = [&*(all / PERIOD).to_string(), &*format!("{LOOP_START:x}")];
    let last = text.lines().last().map(|line| line.split_whitespace().collect::<Vec<_>>());
    assert_eq!(last.as_deref(), Some(&samples[..]), "{text}");
}

/// Counts the loop on two CPUs at the same time, and samples it on both.
fn on_two_cpus() -> String {
    format!(
        "nproc
        for cpu in 1 2; do taskset $cpu {STAT} -e instructions:u $1 2>&1 & done
        wait
        for cpu in 1 2; do
            taskset $cpu perf record -q --sample-cpu -e instructions:u -c {PERIOD} -o /tmp/data$cpu $1 &
        done
        wait
        for cpu in 1 2; do perf script -i /tmp/data$cpu -F cpu,ip | sort | uniq -c; done"
    )
}

/// Counts it in all modes, as the base PMU knows of none, and tries to sample it.
fn at_base() -> String {
    format!(
        "{STAT} -e instructions,cycles $1 2>&1
        perf record -e cycles:u -o /tmp/data $1 2>&1
        echo status $?"
    )
}

static RESULTS: LazyLock<Results> = LazyLock::new(|| {
    let run = |options: &str, script: &str| format!("./tally run {options} -- sh {script} /lib/tally/loop");
    let stat = format!("{STAT} -e instructions:u,cycles:u $1");
    let on_each_cpu = format!("for cpu in 1 2; do taskset $cpu {STAT} -e instructions:u $1 2>&1; done");
    let steps = Steps::on_riscv("riscv")
        .in_guest("measure", measure().into_bytes())
        .in_guest("on-two-cpus", on_two_cpus().into_bytes())
        .in_guest("at-base", at_base().into_bytes())
        .in_guest("stat", stat.into_bytes())
        .in_guest("on-each-cpu", on_each_cpu.into_bytes())
        .configure_host(|scenario| scenario.program(LOOP, "loop").program(measure(), "measure"))
        .step("host", "sh ./measure ./loop")
        .step("guest", &run("-v", "measure"))
        .step("base", &run("--pmu riscv-base", "at-base"))
        .step("none", &run("--pmu none --cpus 2", "on-each-cpu"))
        .step("files", FILES)
        .step("attribution", ATTRIBUTION);
    steps
        .second_tier(|steps| {
            with_installed_kernel(steps, "newest", Suite::Sid)
                .step("newest", &run("-v --kernel newest/boot/vmlinuz", "measure"))
                .step("two", &run("--cpus 2", "on-two-cpus"))
                .step("kvm", &run("--pmu kvm", "stat"))
        })
        .run()
});

const FILES: &str = "
    mkdir share
    echo given >share/in
    ./tally run --share share:rw -- sh -c \"cd $PWD/share; cat in; echo made >out; exit 7\"
    echo $?
    cat share/out";

/// Counts what a guest's vCPU does, while the guest goes round its loop, in the guest and for it. Linux' driver leaves out
/// modes of the host unless it is told that modes of the guest are meant, by a bit that `perf` has no name for.
const ATTRIBUTION: &str = "
    for events in instructions/config1=1/uG instructions:uH; do
        rm -f in; mkfifo in
        ./tally run -- sh -c 'read go; /lib/tally/loop; echo done; read go' <in >said & tally=$!
        exec 3>in
        until comm=$(grep -ls '^vcpu0' /proc/$tally/task/*/comm); do sleep 0.1; done
        vcpu=${comm%/comm}
        sleep 3
        perf stat -x'|' -e $events -t ${vcpu##*/} -o counted & perf=$!
        sleep 0.5
        echo >&3
        until grep -q done said; do sleep 0.1; done
        kill -INT $perf
        wait $perf
        grep instructions counted
        echo >&3
        exec 3>&-
        wait $tally
    done";

fn a_guest_counts_and_samples_what_the_host_does() {
    for place in ["host", "guest"] {
        let done = RESULTS.of(place);
        assert_eq!(done.status, 0, "{place}: {}", done.err);
        measured(&done.text());
    }
}

fn what_was_changed_in_the_kernel_is_told() {
    let said = &RESULTS.of("guest").err;
    assert!(said.contains("the guest sees RISC-V's PMU, cycle, instret and "), "{said}");
    assert!(said.contains("31 counters are read by the code at"), "{said}");
    assert_eq!(said.matches("the SBI PMU extension's id in ").count(), 16, "{said}");
    assert_eq!(said.matches("the overflows are read into ").count(), 1, "{said}");
    assert!(said.contains("riscv-pmu-sbi: SBI PMU extension is available"), "{said}");
    assert!(!said.contains("starved"), "{said}");
}

fn the_newest_kernel_is_a_guest_as_well() {
    let done = RESULTS.of("newest");
    assert!(done.err.contains("] Linux version 7."), "{}", done.err);
    measured(&done.text());
}

fn two_vcpus_count_at_the_same_time() {
    let done = RESULTS.of("two");
    let text = done.text();
    assert_eq!(text.lines().next(), Some("2"), "{}", done.err);
    let values: Vec<u64> = counts(&text).iter().map(Count::exact).collect();
    assert_eq!(values, [LOOP_INSTRUCTIONS; 2], "{text}");
    let (number, place) = ((LOOP_INSTRUCTIONS / PERIOD).to_string(), format!("{LOOP_START:x}"));
    let samples: Vec<Vec<&str>> =
        text.lines().rev().take(2).map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(samples, [[&*number, "[001]", &*place], [&*number, "[000]", &*place]], "{text}");
}

fn the_base_pmu_counts_and_is_refused_sampling() {
    let done = RESULTS.of("base");
    let text = done.text();
    let values: Vec<u64> = counts(&text).iter().map(Count::exact).collect();
    let [instructions, cycles] = values[..] else { panic!("{text}{}", done.err) };
    // In all modes: this PMU knows of none.
    for value in [instructions, cycles] {
        assert!((LOOP_INSTRUCTIONS..LOOP_INSTRUCTIONS / 20 * 21).contains(&value), "{text}");
    }
    let last = text.lines().last();
    assert!(text.contains("Error:") && last.is_some_and(|line| line != "status 0"), "{text}");
}

fn kvms_own_pmu_counts_the_same() {
    let done = RESULTS.of("kvm");
    let values: Vec<u64> = counts(&done.err).iter().map(Count::exact).collect();
    assert_eq!(values, [LOOP_INSTRUCTIONS; 2], "{}", done.err);
}

fn without_a_pmu_nothing_is_counted() {
    let done = RESULTS.of("none");
    let counted = counts(&done.text());
    assert_eq!(counted.len(), 2, "{}{}", done.text(), done.err);
    assert!(counted.iter().all(|count| count.value == Value::NotSupported), "{}", done.text());
}

fn a_guest_has_folders_and_ends_with_its_commands_status() {
    let done = RESULTS.of("files");
    assert_eq!(done.text(), "given\n7\nmade\n", "{}", done.err);
}

fn the_host_tells_the_guests_work_from_that_for_it() {
    let done = RESULTS.of("attribution");
    let values: Vec<u64> = counts(&done.text()).iter().map(Count::exact).collect();
    let [guest, host] = values[..] else { panic!("{}{}", done.text(), done.err) };
    // The shell that starts the loop is counted with it.
    assert!((LOOP_INSTRUCTIONS..LOOP_INSTRUCTIONS / 100 * 101).contains(&guest), "{guest}");
    assert!(host < LOOP_INSTRUCTIONS / 100, "{host}");
}
