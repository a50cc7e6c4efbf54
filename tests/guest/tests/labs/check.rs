//! Tests of `tally check` on the lab's simulated host, where every count is exact.

use std::sync::LazyLock;

use guest_tests::lab::{Results, StepOutput, Steps};
use guest_tests::suite::Test;
use guest_tests::tests;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    tests![every_count_of_every_pmu_is_exact, a_report_names_the_host_and_the_pmu, kvms_own_vpmu_is_refused,]
}

static RESULTS: LazyLock<Results> = LazyLock::new(|| {
    Steps::new("check")
        .step("auto", "./tally check")
        .step("amd-legacy", "./tally check --pmu amd-legacy --counters 4")
        .step("intel", "./tally check --pmu intel")
        .step("intel-v2", "./tally check --pmu intel-v2 --counters 3")
        .step("without", "./tally check --pmu kvm")
        .run()
});

/// Returns the verdicts. Checks their number.
fn verdicts(done: &StepOutput, number: usize) -> Vec<String> {
    let text = done.text();
    assert_eq!((done.status, done.err.as_str()), (0, ""), "{text}");
    let compared = text.lines().filter(|line| line.starts_with("  ") && line.contains(" of "));
    let verdicts: Vec<String> =
        compared.filter_map(|line| line.split_whitespace().last()).map(str::to_owned).collect();
    assert_eq!(verdicts.len(), number, "{text}");
    verdicts
}

fn every_count_of_every_pmu_is_exact() {
    // Each counter alone, overflows and their interrupts, two events, all general counters at once, and samples.
    for (pmu, counts) in
        [("auto", 6 + 2 + 2 + 6 + 1), ("amd-legacy", 13), ("intel", 4 + 1 + 2 + 2 + 4 + 1), ("intel-v2", 12)]
    {
        let done = RESULTS.of(pmu);
        assert!(verdicts(done, counts).iter().all(|verdict| verdict == "exact"), "{pmu}: {}", done.text());
    }
}

fn a_report_names_the_host_and_the_pmu() {
    for (pmu, words) in [
        ("auto", "AMD's PMU with PerfMonV2, 6 counters"),
        ("amd-legacy", "AMD's PMU without PerfMonV2, 4 counters"),
        ("intel", "Intel's PMU, version 5, 4 general and 2 fixed counters, absent events 0x1c"),
        ("intel-v2", "Intel's PMU, version 2, 3 general and 2 fixed counters, absent events 0x1c"),
    ] {
        let text = RESULTS.of(pmu).text();
        assert!(text.contains(words), "{text}");
        assert!(text.contains("host   Linux ") && text.contains("family 23, model 49"), "{text}");
    }
}

fn kvms_own_vpmu_is_refused() {
    let done = RESULTS.of("without");
    assert_eq!((done.status, done.text().as_str()), (125, ""));
    assert_eq!(done.err, "tally: --pmu kvm is no PMU of Tally's: there is nothing to check\n");
}
