//! What a guest's use of its counters may cost on a RISC-V host. The lab counts it, so the numbers are exact, but for instructions, which
//! are known to fifty.

use std::sync::LazyLock;

use guest_images::{Arch, Progress};
use guest_tests::suite::{Test, second_tier};
use guest_tests::tests;
use tally_lab::cross;
use tally_lab::pmu_figures::{Figures, PerUnit, Programs, Quantity, Work, measure};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    second_tier(tests![
        every_exit_goes_to_user_space_and_there_are_as_many_as_there_were,
        other_system_calls_are_as_many_as_they_were,
        nothing_costs_more_instructions_than_it_did,
    ])
}

/// What one thing costs that is done with so many events.
struct Cost {
    work: Work,
    events: u8,
    /// All that it leaves the guest for goes to user space.
    exits: i64,
    /// Other system calls of the vCPU's thread.
    calls: i64,
    /// What it has cost, in instructions of host and guest together.
    instructions: i64,
}

const COSTS: [Cost; 5] = [
    Cost { work: Work::Read, events: 1, exits: 1, calls: 1, instructions: 23_410 },
    Cost { work: Work::Switch, events: 1, exits: 5, calls: 2, instructions: 69_650 },
    Cost { work: Work::Switch, events: 6, exits: 30, calls: 39, instructions: 289_200 },
    Cost { work: Work::Overflow, events: 1, exits: 6, calls: 8, instructions: 52_550 },
    Cost { work: Work::Overflow, events: 6, exits: 6, calls: 15, instructions: 73_700 },
];

/// What costs a twentieth more than it did, or less, is to be looked at.
const TOLERANCE: i64 = 20;

static FIGURES: LazyLock<Figures> = LazyLock::new(|| {
    let mut progress = Progress::stderr("lab");
    let programs = cross::program("tally", &mut progress).and_then(|tally| {
        let workload = cross::own_program("pmu-workload", &mut progress)?;
        Ok(Programs { tally, workload })
    });
    programs
        .and_then(|programs| measure(Arch::Riscv64, &["auto"], &programs, &mut progress))
        .unwrap_or_else(|error| panic!("{error}"))
        .remove(0)
});

/// Looks at what each thing costs of something.
fn each(quantity: &Quantity, expected: impl Fn(&Cost) -> i64) {
    for cost @ Cost { work, events, .. } in &COSTS {
        let measured = FIGURES.cost(*work, *events, quantity);
        assert_eq!(measured, Some(PerUnit::whole(expected(cost))), "{work:?} with {events}: {quantity:?}");
    }
}

fn every_exit_goes_to_user_space_and_there_are_as_many_as_there_were() {
    each(&Quantity::Exits, |cost| cost.exits);
    each(&Quantity::Runs, |cost| cost.exits);
}

fn other_system_calls_are_as_many_as_they_were() {
    each(&Quantity::OtherCalls, |cost| cost.calls);
}

fn nothing_costs_more_instructions_than_it_did() {
    for Cost { work, events, instructions, .. } in &COSTS {
        let now = FIGURES.instructions(*work, *events).expect("it was measured");
        let [least, most] =
            [-1, 1].map(|sign| PerUnit::whole(instructions + sign * instructions / TOLERANCE));
        assert!(least <= now && now <= most, "{work:?} with {events}: {now}, {instructions} before");
    }
}
