//! What guests and their use of counters may cost the host. The lab counts it, so the numbers are exact.

use std::sync::LazyLock;

use guest_images::{Arch, Progress};
use guest_tests::program;
use guest_tests::suite::{Test, second_tier};
use guest_tests::tests;
use tally_lab::pmu_figures::{Figures, PerUnit, Programs, Quantity, Work, measure};
use tally_lab::use_figures;
use tally_lab::watch_figures::attention::{self, MOST_PER_SECOND, SOON};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    second_tier(tests![
        reading_a_counter_costs_one_exit_and_no_other_system_call,
        a_sample_of_a_program_costs_one_exit_to_user_space_whatever_the_number_of_events,
        a_sample_costs_a_signal_and_an_nmi,
        switching_tasks_costs_four_exits_to_user_space_and_no_other_system_call,
        nothing_costs_more_instructions_than_it_did,
        a_command_costs_fewer_exits_than_with_the_peer,
        a_shared_folder_costs_few_exits,
        who_looks_every_second_costs_the_guest_less_than_a_thousandth,
        a_theft_is_reported_within_a_tenth_of_a_second,
    ])
}

/// What a PMU may cost.
struct Limits {
    pmu: &'static str,
    /// The other system calls for a sample, each of them made once.
    sample_calls: &'static [&'static str],
    /// What everything has cost, in instructions of host and guest together: a read, a switch with one and with six counters, a
    /// sample of one event, one while six are sampled.
    instructions: [i64; 5],
}

/// What costs a twentieth more than it did is to be looked at.
const TOLERANCE: i64 = 20;

/// Exits to user space for a sample of a program: the alarm. The guest does the rest in its memory.
const SAMPLE: i64 = 1;
/// And for a task switch: one task's counters are frozen and thawed, and the other's.
const SWITCH: i64 = 4;

const LIMITS: [Limits; 2] = [
    Limits {
        pmu: "amd",
        sample_calls: &["KVM_SIGNAL_MSI", "rt_sigtimedwait"],
        instructions: [5_107, 28_108, 45_825, 13_543, 17_402],
    },
    Limits {
        pmu: "intel",
        // The processor masks the interrupt where it enters the APIC.
        sample_calls: &["KVM_SET_MSRS", "KVM_SIGNAL_MSI", "rt_sigtimedwait"],
        instructions: [4_881, 27_354, 44_676, 16_973, 20_462],
    },
];

/// Exits to user space at most, from the start of `tally run -- echo hello` to its end.
const HELLO_EXITS: u64 = 400;
/// At most for a file that is read from a shared folder.
const SHARE_EXITS: u64 = 1_700;

static FIGURES: LazyLock<Vec<Figures>> = LazyLock::new(|| {
    let programs = Programs { tally: program("tally"), workload: program("pmu-workload") };
    measure(Arch::X86_64, &LIMITS.map(|limits| limits.pmu), &programs, &mut Progress::stderr("lab"))
        .unwrap_or_else(|error| panic!("{error}"))
});

fn measured() -> impl Iterator<Item = (&'static Limits, &'static Figures)> {
    LIMITS.iter().zip(FIGURES.iter())
}

fn cost(pmu: &Figures, work: Work, events: u8, quantity: &Quantity) -> PerUnit {
    pmu.cost(work, events, quantity).unwrap_or_else(|| panic!("{}: {quantity:?} was not measured", pmu.pmu))
}

fn reading_a_counter_costs_one_exit_and_no_other_system_call() {
    for (Limits { pmu, .. }, figures) in measured() {
        assert_eq!(cost(figures, Work::Read, 1, &Quantity::Exits), PerUnit::whole(1), "{pmu}");
        assert_eq!(cost(figures, Work::Read, 1, &Quantity::Runs), PerUnit::whole(1), "{pmu}");
        assert_eq!(figures.calls(Work::Read, 1), [], "{pmu}");
    }
}

fn a_sample_of_a_program_costs_one_exit_to_user_space_whatever_the_number_of_events() {
    for (Limits { pmu, .. }, figures) in measured() {
        for events in [1, 6] {
            let runs = cost(figures, Work::Overflow, events, &Quantity::Runs);
            assert_eq!(runs, PerUnit::whole(SAMPLE), "{pmu}: with {events} events");
        }
    }
}

fn a_sample_costs_a_signal_and_an_nmi() {
    for (Limits { pmu, sample_calls, .. }, figures) in measured() {
        let calls = figures.calls(Work::Overflow, 1);
        let once: Vec<_> = sample_calls.iter().map(|name| ((*name).to_owned(), PerUnit::whole(1))).collect();
        assert_eq!(calls, once, "{pmu}");
    }
}

fn switching_tasks_costs_four_exits_to_user_space_and_no_other_system_call() {
    for (Limits { pmu, .. }, figures) in measured() {
        for events in [1, 6] {
            let runs = cost(figures, Work::Switch, events, &Quantity::Runs);
            assert_eq!(runs, PerUnit::whole(SWITCH), "{pmu}: with {events} counters");
            assert_eq!(figures.calls(Work::Switch, events), [], "{pmu}: with {events} counters");
        }
    }
}

fn nothing_costs_more_instructions_than_it_did() {
    let works =
        [(Work::Read, 1), (Work::Switch, 1), (Work::Switch, 6), (Work::Overflow, 1), (Work::Overflow, 6)];
    for (Limits { pmu, instructions, .. }, figures) in measured() {
        for ((work, events), before) in works.into_iter().zip(*instructions) {
            let now = figures.instructions(work, events).expect("it was measured");
            let most = PerUnit::whole(before + before / TOLERANCE);
            assert!(now <= most, "{pmu}: {work:?} with {events}: {now} instructions, {before} before");
        }
    }
}

static USE: LazyLock<use_figures::Figures> = LazyLock::new(|| {
    use_figures::measure(&program("tally"), &mut Progress::stderr("lab"))
        .unwrap_or_else(|error| panic!("{error}"))
});

fn a_command_costs_fewer_exits_than_with_the_peer() {
    let [tally, peers @ ..] = &USE.hellos[..] else { panic!("nothing was measured") };
    assert_eq!((tally.monitor.as_str(), peers.len()), ("tally", 2));
    assert!(tally.end.exits <= HELLO_EXITS, "{tally:?}");
    for peer in peers {
        assert!(
            tally.first.exits < peer.first.exits && tally.end.exits < peer.end.exits,
            "{tally:?} {peer:?}"
        );
    }
}

fn a_shared_folder_costs_few_exits() {
    let ours: Vec<_> = USE.readings.iter().filter(|reading| reading.monitor == "tally").collect();
    assert_eq!(ours.len(), 2);
    for reading in ours {
        assert!(reading.cost.exits <= SHARE_EXITS, "{reading:?}");
    }
}

static ATTENTION: LazyLock<attention::Figures> = LazyLock::new(|| {
    let programs = attention::Programs { tally: program("tally"), thief: program("counter-thief") };
    let extent = attention::Extent { counters: &[1], seconds: 3 };
    attention::measure(extent, &programs, &mut Progress::stderr("lab"))
        .unwrap_or_else(|error| panic!("{error}"))
});

fn who_looks_every_second_costs_the_guest_less_than_a_thousandth() {
    assert_eq!(ATTENTION.prices.len(), 3);
    for price in &ATTENTION.prices {
        assert!(price.per_second < MOST_PER_SECOND, "{price:?}");
    }
}

fn a_theft_is_reported_within_a_tenth_of_a_second() {
    assert!(!ATTENTION.reports.is_empty());
    assert!(ATTENTION.reports.iter().all(|after| *after < SOON), "{:?}", ATTENTION.reports);
}
