//! The lab proves itself, before anything of ours is believed that runs on it.

use guest_images::Progress;
use guest_tests::suite::{Test, second_tier};
use guest_tests::tests;
use tally_lab::Result;
use tally_lab::self_test::{self, Check};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    [
        tests![
            the_host_counts_and_samples_exactly,
            events_count_a_guest_and_its_host_apart,
            a_guest_that_is_left_goes_on_where_it_was,
        ],
        second_tier(tests![
            a_guest_of_the_peers_counts_and_samples_exactly,
            the_riscv_host_counts_and_samples_exactly,
            a_riscv_guest_of_the_peers_counts_exactly,
        ]),
    ]
    .concat()
}

/// All checks of a group, each with what it measured.
fn hold(group: impl FnOnce(&mut Progress) -> Result<Vec<Check>>) {
    let checks = group(&mut Progress::stderr("lab")).unwrap_or_else(|error| panic!("{error}"));
    assert!(!checks.is_empty());
    let failed: Vec<_> =
        checks.iter().filter(|check| !check.holds()).map(|check| format!("\n{check}")).collect();
    assert!(failed.is_empty(), "{} of {}:{}", failed.len(), checks.len(), failed.concat());
}

fn the_host_counts_and_samples_exactly() {
    hold(self_test::on_the_host);
}

fn a_guest_of_the_peers_counts_and_samples_exactly() {
    hold(self_test::in_a_guest);
}

fn events_count_a_guest_and_its_host_apart() {
    hold(self_test::guest_and_host_apart);
}

fn a_guest_that_is_left_goes_on_where_it_was() {
    hold(self_test::leaving_a_guest);
}

fn the_riscv_host_counts_and_samples_exactly() {
    hold(self_test::on_the_riscv_host);
}

fn a_riscv_guest_of_the_peers_counts_exactly() {
    hold(self_test::in_a_riscv_guest);
}
