//! The lab's self-tests. The results of all other tests on simulated hosts depend on them.

use guest_images::Progress;
use guest_tests::suite::{Test, second_tier, third_tier};
use guest_tests::tests;
use tally_lab::Result;
use tally_lab::self_test::{self, Check};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    [
        tests![
            the_host_counts_and_samples_exactly,
            events_count_guest_and_host_separately,
            a_guest_resumes_correctly_after_each_exit,
        ],
        second_tier(tests![
            a_qemu_guest_counts_and_samples_exactly,
            the_intel_host_counts_and_samples_exactly,
            an_intel_host_with_an_older_pmu_counts_and_samples_exactly,
            the_riscv_host_counts_and_samples_exactly,
            a_riscv_qemu_guest_counts_exactly,
        ]),
        third_tier(tests![an_intel_qemu_guest_counts_and_samples_exactly]),
    ]
    .concat()
}

/// Runs a group of checks, and panics with the failed ones.
fn assert_group_holds(group: impl FnOnce(&mut Progress) -> Result<Vec<Check>>) {
    let checks = group(&mut Progress::stderr("lab")).unwrap_or_else(|error| panic!("{error}"));
    assert!(!checks.is_empty());
    let failed: Vec<_> =
        checks.iter().filter(|check| !check.holds()).map(|check| format!("\n{check}")).collect();
    assert!(failed.is_empty(), "{} of {}:{}", failed.len(), checks.len(), failed.concat());
}

fn the_host_counts_and_samples_exactly() {
    assert_group_holds(self_test::on_the_host);
}

fn a_qemu_guest_counts_and_samples_exactly() {
    assert_group_holds(self_test::in_a_guest);
}

fn events_count_guest_and_host_separately() {
    assert_group_holds(self_test::guest_and_host_apart);
}

fn a_guest_resumes_correctly_after_each_exit() {
    assert_group_holds(self_test::leaving_a_guest);
}

fn the_intel_host_counts_and_samples_exactly() {
    assert_group_holds(self_test::on_the_intel_host);
}

fn an_intel_qemu_guest_counts_and_samples_exactly() {
    assert_group_holds(self_test::in_an_intel_guest);
}

fn an_intel_host_with_an_older_pmu_counts_and_samples_exactly() {
    assert_group_holds(self_test::with_older_versions_on_intel);
}

fn the_riscv_host_counts_and_samples_exactly() {
    assert_group_holds(self_test::on_the_riscv_host);
}

fn a_riscv_qemu_guest_counts_exactly() {
    assert_group_holds(self_test::in_a_riscv_guest);
}
