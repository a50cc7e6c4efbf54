//! What a guest's use of its counters may cost the host. The lab counts it, so the numbers are exact.

use std::sync::LazyLock;

use guest_images::Progress;
use guest_tests::program;
use tally_lab::pmu_figures::{Figures, PerUnit, Programs, Quantity, Work, measure};

static AMD: LazyLock<Figures> = LazyLock::new(|| {
    let programs = Programs { tally: program("tally"), workload: program("pmu-workload") };
    let mut figures =
        measure(&["amd"], &programs, &mut Progress::stderr("lab")).unwrap_or_else(|error| panic!("{error}"));
    figures.remove(0)
});

fn cost(work: Work, events: u8, quantity: &Quantity) -> PerUnit {
    AMD.cost(work, events, quantity).unwrap_or_else(|| panic!("{quantity:?} was not measured"))
}

#[test]
fn reading_a_counter_costs_one_exit_and_no_other_system_call() {
    assert_eq!(cost(Work::Read, 1, &Quantity::Exits), PerUnit::whole(1));
    assert_eq!(cost(Work::Read, 1, &Quantity::Runs), PerUnit::whole(1));
    assert_eq!(AMD.calls(Work::Read, 1), []);
}

#[test]
fn a_sample_costs_seven_exits_to_user_space() {
    assert_eq!(cost(Work::Overflow, 1, &Quantity::Runs), PerUnit::whole(7));
}

#[test]
fn a_sample_costs_a_signal_a_look_at_the_apic_and_an_nmi() {
    let once = |name: &str| (name.to_owned(), PerUnit::whole(1));
    assert_eq!(AMD.calls(Work::Overflow, 1), ["KVM_GET_LAPIC", "KVM_NMI", "rt_sigreturn"].map(once));
}

#[test]
fn switching_tasks_costs_exits_and_no_other_system_call() {
    for (events, most) in [(1, 10), (6, 40)] {
        let runs = cost(Work::Switch, events, &Quantity::Runs);
        assert!(runs <= PerUnit::whole(most), "{runs} with {events} counters");
        assert_eq!(AMD.calls(Work::Switch, events), [], "with {events} counters");
    }
}
