//! The lab proves itself before anything of ours runs on it. Each group of tests shares one boot.

use std::sync::LazyLock;

use guest_images::Progress;
use tally_lab::self_test::{self, Check};

type Group = LazyLock<Vec<Check>>;

static HOST: Group = LazyLock::new(|| run(self_test::on_the_host));
static GUEST: Group = LazyLock::new(|| run(self_test::in_a_guest));
static APART: Group = LazyLock::new(|| run(self_test::guest_and_host_apart));

fn run(group: fn(&mut Progress) -> tally_lab::Result<Vec<Check>>) -> Vec<Check> {
    group(&mut Progress::stderr("tally-lab")).unwrap_or_else(|error| panic!("{error}"))
}

fn holds(group: &Group, name: &str) {
    let check = group.iter().find(|check| check.name == name).expect("the self-test has this check");
    assert!(check.holds(), "{check}");
}

macro_rules! checks {
    ($($test:ident: $group:ident, $name:literal;)*) => {
        $(#[test]
        fn $test() {
            holds(&$group, $name);
        })*

        #[test]
        fn every_check_has_a_test() {
            let tested = [$($name),*];
            for check in HOST.iter().chain(GUEST.iter()).chain(APART.iter()) {
                assert!(tested.contains(&check.name), "{} has none", check.name);
            }
        }
    };
}

checks! {
    the_host_counts_every_instruction: HOST, "the host counts every instruction";
    on_the_host_an_instruction_is_a_cycle: HOST, "on the host an instruction is a cycle";
    the_host_counts_every_branch: HOST, "the host counts every branch";
    the_host_counts_every_conditional_branch: HOST, "the host counts every conditional branch";
    on_the_host_a_loop_ends_unpredicted: HOST, "on the host a loop ends unpredicted";
    the_host_takes_every_sample: HOST, "the host takes every sample";
    a_guest_of_kvms_pmu_counts_every_instruction: GUEST, "a guest of KVM's PMU counts every instruction";
    in_a_guest_an_instruction_is_a_cycle: GUEST, "in a guest an instruction is a cycle";
    a_guest_counts_every_branch: GUEST, "a guest counts every branch";
    a_guest_counts_every_conditional_branch: GUEST, "a guest counts every conditional branch";
    in_a_guest_a_loop_ends_unpredicted: GUEST, "in a guest a loop ends unpredicted";
    a_guest_takes_every_sample: GUEST, "a guest takes every sample";
    a_guests_loop_is_found_exactly: APART, "an event for guests alone finds a guest's loop to the instruction";
    a_guests_loop_is_not_the_hosts: APART, "an event for the host alone finds nothing of a guest's loop";
}
