//! Tests on a RISC-V host whose KVM cannot deliver a guest's overflow interrupts. Guests there count, but cannot
//! sample.

use std::sync::LazyLock;

use guest_images::payloads::LOOP_INSTRUCTIONS;
use guest_images::{Arch, Release, Suite};
use guest_tests::lab::{Results, Steps};
use guest_tests::perf::{Count, STAT, counts};
use guest_tests::suite::{Test, second_tier};
use guest_tests::tests;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    second_tier(tests![
        guests_count_and_a_message_says_that_they_cannot_sample,
        a_pmu_with_interrupts_is_refused,
    ])
}

static RESULTS: LazyLock<Results> = LazyLock::new(|| {
    let script = format!(
        "{STAT} -e instructions,cycles $1 2>&1
        perf record -e cycles:u -o /tmp/data $1 2>&1
        echo status $?"
    );
    Steps::on_riscv("riscv::older_host")
        .configure_host(|scenario| scenario.host(Release { suite: Suite::Trixie, arch: Arch::Riscv64 }))
        .in_guest("count", script.into_bytes())
        .step("auto", "./tally run -- sh count /lib/tally/loop")
        .step("riscv", "./tally run --pmu riscv -- true")
        .run()
});

const WHY: &str = "this host's KVM cannot give a guest the interrupt of its counters (a newer kernel can)";

fn guests_count_and_a_message_says_that_they_cannot_sample() {
    let done = RESULTS.of("auto");
    assert_eq!(done.err, format!("tally: {WHY}: the guest's PMU counts only, and cannot be sampled with\n"));
    let text = done.text();
    let values: Vec<u64> = counts(&text).iter().map(Count::exact).collect();
    let [instructions, cycles] = values[..] else { panic!("{text}") };
    // The counts include all modes: Linux' driver does not select modes on a PMU without interrupts.
    for value in [instructions, cycles] {
        assert!((LOOP_INSTRUCTIONS..LOOP_INSTRUCTIONS / 20 * 21).contains(&value), "{text}");
    }
    let last = text.lines().last();
    assert!(text.contains("Error:") && last.is_some_and(|line| line != "status 0"), "{text}");
}

fn a_pmu_with_interrupts_is_refused() {
    let done = RESULTS.of("riscv");
    let line = format!(
        "tally: --pmu riscv needs overflow interrupts, and {WHY}: --pmu auto and --pmu riscv-base count without\n"
    );
    assert_eq!((done.status, &done.err), (125, &line));
}
