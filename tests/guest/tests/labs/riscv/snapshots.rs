//! Tests of snapshots and templates on a RISC-V host: a guest that was saved and restored counts as one that was not.
//! One host for all of them.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use guest_images::payloads::LOOP_INSTRUCTIONS;
use guest_images::payloads::riscv64::LOOP;
use guest_tests::lab::{Results, SAVED_GUESTS, Steps};
use guest_tests::perf::{Count, STAT, counts};
use guest_tests::suite::{Test, second_tier};
use guest_tests::tests;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    second_tier(tests![
        over_snapshots_no_count_and_no_sample_is_lost_or_made_up,
        time_between_is_told_to_the_clock_and_not_to_timers,
        vcpus_count_separately_over_snapshots_within_the_sandbox,
        a_host_whose_processor_differs_is_refused,
        a_host_without_the_guests_pmu_is_refused,
        guests_from_a_template_count_exactly_and_draw_different_random_numbers,
    ])
}

/// Instructions of [`long_loop`].
const INSTRUCTIONS: u64 = 2 * 500_000_000 + 4;
/// Instructions between two samples: odd, so that both instructions of the loop are sampled.
const PERIOD: u64 = 1_000_003;
/// Number of snapshots in a chain.
const SNAPSHOTS: u64 = 4;
/// Seconds between a snapshot and its restoring.
const GAP: u32 = 3;

/// Returns [`LOOP`] with 500 million rounds instead of ten.
fn long_loop() -> Vec<u8> {
    const TEN_MILLION: [u32; 2] = [0x0098_9537, 0x6805_0513];
    /// `lui a0, 0x1dcd6` and `addi a0, a0, 0x500`.
    const MORE: [u32; 2] = [0x1dcd_6537, 0x5005_0513];
    let bytes = |words: [u32; 2]| words.map(u32::to_le_bytes).concat();
    let at = LOOP.windows(8).position(|found| found == bytes(TEN_MILLION)).expect("it is there");
    [&LOOP[..at], &bytes(MORE), &LOOP[at + 8..]].concat()
}

/// The ISA extension `c` in what a snapshot says of the processor (KVM API, 4.68).
const COMPRESSED: u64 = 0x8030_0000_0700_0001;

static RESULTS: LazyLock<Results> = LazyLock::new(|| {
    // The clock is looked at before and after both.
    let measure = format!(
        "echo ready; date +%s; read up rest </proc/uptime; echo $up; {STAT} -e instructions:u ./long 2>&1; \
         perf record -q -o /tmp/data -e instructions:u -c {PERIOD} ./long; \
         perf script -i /tmp/data -F ip | grep . >/tmp/samples; wc -l </tmp/samples; sha256sum </tmp/samples; \
         read up rest </proc/uptime; echo $up; date +%s; exit 7"
    );
    let both = format!(
        "echo ready; for cpu in 1 2; do taskset $cpu {STAT} -o /tmp/$cpu -e instructions:u ./long & done; wait; cat /tmp/1 /tmp/2"
    );
    // The checksum that gzip writes is the snapshot's: a CRC-32 of what follows the first line.
    let other_processor = format!(
        "tail -n +2 kept/state | sed 's/\\[{COMPRESSED},1\\]/[{COMPRESSED},0]/' >changed; \
         sum=$(gzip -c changed | tail -c 8 | head -c 4 | od -An -tu4 | tr -d ' '); \
         head -n 1 kept/state | sed \"s/crc32\\\":[0-9]*/crc32\\\":$sum/\" >first; cat first changed >kept/state"
    );
    let template = format!(
        "{STAT} -e instructions:u /lib/tally/loop 2>&1; cat /proc/sys/kernel/random/uuid; dmesg | grep 'virtual machine fork'"
    );
    Steps::on_riscv("riscv::snapshots")
        .in_guest("long", long_loop())
        .in_guest("measure", measure.into_bytes())
        .in_guest("both", both.into_bytes())
        .in_guest("template", template.into_bytes())
        .step("undisturbed", &format!("{SAVED_GUESTS} chain undisturbed 0 0 -- sh ./measure"))
        .step("chain", &format!("{SAVED_GUESTS} chain chain {SNAPSHOTS} {GAP} -- sh ./measure"))
        .step(
            "vcpus",
            &format!(
                "{SAVED_GUESTS} dmesg -c >/dev/null; chain vcpus 3 0 --cpus 2 --sandbox log -- sh ./both; dmesg | grep -c type=1326"
            ),
        )
        .step(
            "refused",
            &format!(
                "{SAVED_GUESTS} ./tally run --name kept -- sh -c 'echo ready; sleep 10' >kept.said & vm=$!; said kept.said; \
                 ./tally snapshot kept kept --stop; wait $vm; \
                 sed s/_sscofpmf// /proc/cpuinfo >cpuinfo; mount --bind cpuinfo /proc/cpuinfo; ./tally run --restore kept; echo $?; \
                 umount /proc/cpuinfo; {other_processor}; ./tally run --restore kept; echo $?; rm -r kept"
            ),
        )
        .step(
            "template",
            "for run in 1 2; do TALLY_CACHE=$PWD/cache TALLY_BOOT= ./tally run -v -- sh ./template; done",
        )
        .run()
});

/// The parts of what `measure` prints.
struct Measured {
    seconds: u64,
    uptime: f64,
    instructions: u64,
    samples: String,
}

impl Measured {
    fn of(step: &str) -> Self {
        let done = RESULTS.of(step);
        let text = done.text();
        assert_eq!(done.status, 7, "{text}{}", done.err);
        let lines: Vec<&str> = text.lines().collect();
        let [_, begun, up, counted, number, sum, still_up, ended] = lines[..] else {
            panic!("{text}{}", done.err)
        };
        let (second, time) =
            (|text: &str| text.parse::<u64>().unwrap(), |text: &str| text.parse::<f64>().unwrap());
        let counted: Vec<u64> = counts(counted).iter().map(Count::exact).collect();
        Self {
            seconds: second(ended) - second(begun),
            uptime: time(still_up) - time(up),
            instructions: counted[0],
            samples: format!("{number} {sum}"),
        }
    }
}

fn over_snapshots_no_count_and_no_sample_is_lost_or_made_up() {
    let (undisturbed, chain) = (Measured::of("undisturbed"), Measured::of("chain"));
    assert_eq!((undisturbed.instructions, chain.instructions), (INSTRUCTIONS, INSTRUCTIONS));
    // Their number and their addresses, in their order.
    assert!(chain.samples.starts_with(&format!("{} ", INSTRUCTIONS / PERIOD)), "{}", chain.samples);
    assert_eq!(chain.samples, undisturbed.samples);
}

fn time_between_is_told_to_the_clock_and_not_to_timers() {
    let (undisturbed, chain) = (Measured::of("undisturbed"), Measured::of("chain"));
    assert!(chain.seconds >= SNAPSHOTS * u64::from(GAP), "{}", chain.seconds);
    // All of it happens in virtual time. The guest's own clock stops at a snapshot: it does not see one of the gaps.
    let longer = chain.uptime - undisturbed.uptime;
    assert!(longer < f64::from(GAP), "{} and {}", chain.uptime, undisturbed.uptime);
}

fn vcpus_count_separately_over_snapshots_within_the_sandbox() {
    let done = RESULTS.of("vcpus");
    let text = done.text();
    let values: Vec<u64> = counts(&text).iter().map(Count::exact).collect();
    assert_eq!(values, [INSTRUCTIONS; 2], "{text}{}", done.err);
    // No system call was logged.
    assert!(text.ends_with("\n0\n"), "{text}{}", done.err);
}

fn refused() -> (String, Vec<String>) {
    let done = RESULTS.of("refused");
    assert_eq!(done.text(), "125\n125\n", "{}", done.err);
    let lines = done.err.lines().filter(|line| !line.ends_with("`tally run --restore` continues it"));
    (done.err.clone(), lines.map(str::to_owned).collect())
}

fn a_host_without_the_guests_pmu_is_refused() {
    let (err, lines) = refused();
    assert!(lines[0].contains("this host's PMU cannot tell guests from the host"), "{err}");
}

fn a_host_whose_processor_differs_is_refused() {
    let (err, lines) = refused();
    let why = "tally: this host's processor is not the one that the guest was saved on: it has the ISA extension c as well";
    assert_eq!(lines[1..], [why], "{err}");
}

fn guests_from_a_template_count_exactly_and_draw_different_random_numbers() {
    let done = RESULTS.of("template");
    let text = done.text();
    let values: Vec<u64> = counts(&text).iter().map(Count::exact).collect();
    assert_eq!(values, [LOOP_INSTRUCTIONS; 2], "{text}{}", done.err);
    assert_eq!(done.err.matches("the guest starts from the template").count(), 2, "{}", done.err);
    let drawn: BTreeSet<&str> = text.lines().filter(|line| line.len() == 36 && !line.contains('|')).collect();
    assert_eq!(drawn.len(), 2, "{text}");
    let reseeded = text.matches("crng reseeded due to virtual machine fork").count();
    assert_eq!(reseeded, 2, "{text}{}", done.err);
}
