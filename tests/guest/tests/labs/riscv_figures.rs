//! Limits on what a guest's use of its counters costs a RISC-V host. The lab counts exits and system calls exactly, and
//! instructions to within fifty, but those of a task switch have differed by seven hundred between runs.

use std::sync::LazyLock;

use guest_images::Progress;
use guest_tests::suite::{Test, second_tier};
use guest_tests::tests;
use tally_lab::figures::pmu::{Figures, PerUnit, Programs, Quantity, Work, measure};
use tally_lab::{Processor, cross};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    second_tier(tests![
        every_exit_goes_to_user_space_and_their_number_is_unchanged,
        the_number_of_other_system_calls_is_unchanged,
        costs_in_instructions_are_as_recorded,
    ])
}

/// Recorded cost of one operation with a number of events.
struct Cost {
    work: Work,
    events: u8,
    /// Exits, all of which go to user space.
    exits: i64,
    /// System calls of the vCPU's thread beside `KVM_RUN`.
    calls: i64,
    /// Instructions of host and guest together, the sandbox included.
    instructions: i64,
}

/// Costs of a `tally` that is compiled for tests. A release, which `tally-lab figures riscv` measures, costs less.
const COSTS: [Cost; 5] = [
    Cost { work: Work::Read, events: 1, exits: 1, calls: 0, instructions: 7_950 },
    Cost { work: Work::Switch, events: 1, exits: 2, calls: 0, instructions: 25_200 },
    Cost { work: Work::Switch, events: 6, exits: 6, calls: 0, instructions: 93_700 },
    Cost { work: Work::Overflow, events: 1, exits: 1, calls: 4, instructions: 26_900 },
    Cost { work: Work::Overflow, events: 6, exits: 1, calls: 5, instructions: 35_300 },
];

/// Divisor of the tolerance: a cost may differ from the recorded one by a twentieth.
const TOLERANCE: i64 = 20;

static FIGURES: LazyLock<Figures> = LazyLock::new(|| {
    let mut progress = Progress::stderr("lab");
    let programs = cross::program("tally", &mut progress).and_then(|tally| {
        let workload = cross::own_program("pmu-workload", &mut progress)?;
        Ok(Programs { tally, workload })
    });
    programs
        .and_then(|programs| measure(Processor::Riscv64, &["auto"], &programs, &mut progress))
        .unwrap_or_else(|error| panic!("{error}"))
        .remove(0)
});

/// Checks a quantity of each operation's cost.
fn assert_each(quantity: &Quantity, expected: impl Fn(&Cost) -> i64) {
    for cost @ Cost { work, events, .. } in &COSTS {
        let measured = FIGURES.cost(*work, *events, quantity);
        assert_eq!(measured, Some(PerUnit::whole(expected(cost))), "{work:?} with {events}: {quantity:?}");
    }
}

fn every_exit_goes_to_user_space_and_their_number_is_unchanged() {
    assert_each(&Quantity::Exits, |cost| cost.exits);
    assert_each(&Quantity::Runs, |cost| cost.exits);
}

fn the_number_of_other_system_calls_is_unchanged() {
    assert_each(&Quantity::OtherCalls, |cost| cost.calls);
}

fn costs_in_instructions_are_as_recorded() {
    for Cost { work, events, instructions, .. } in &COSTS {
        let now = FIGURES.instructions(*work, *events).expect("it was measured");
        let [least, most] =
            [-1, 1].map(|sign| PerUnit::whole(instructions + sign * instructions / TOLERANCE));
        assert!(least <= now && now <= most, "{work:?} with {events}: {now}, {instructions} before");
    }
}
