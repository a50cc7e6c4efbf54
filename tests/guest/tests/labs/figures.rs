//! Limits on what guests and their use of counters cost the host. The lab counts every instruction and exit, so the
//! figures are exact.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use guest_images::Progress;
use guest_tests::host::{self, Host};
use guest_tests::lab::OnEachHost;
use guest_tests::program;
use guest_tests::suite::{Test, on_intel, second_tier, third_tier};
use guest_tests::tests;
use tally_lab::Processor;
use tally_lab::bench::{self, Column, Cost, Length, Limit, Plan, Row, Workload};
use tally_lab::figures::fleet::GUESTS;
use tally_lab::figures::pmu::{Figures, PerUnit, Programs, Quantity, Work, measure};
use tally_lab::figures::shares::{Measured, Monitor};
use tally_lab::figures::watch::attention::{self, MAX_PER_SECOND, SOON};
use tally_lab::figures::watch::outside;
use tally_lab::figures::{commands, fleet, shares};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    let of_counters = tests![
        reading_a_counter_costs_one_exit_and_no_other_system_call,
        a_sample_of_a_program_costs_one_exit_to_user_space_whatever_the_number_of_events,
        a_sample_costs_one_system_call_beside_the_entry,
        a_task_switch_costs_four_exits_to_user_space_and_no_other_system_call,
        no_operation_costs_more_instructions_than_recorded,
    ];
    let others = tests![
        a_sample_of_cycles_at_a_rate_is_seldom_more_than_one_exit,
        a_hundred_guests_run_on_one_host_and_are_told_apart,
        a_command_answers_in_a_seventh_of_a_second,
        a_command_costs_fewer_exits_than_in_qemu,
        a_snapshot_is_written_and_restored_in_half_a_second,
        a_kernel_that_was_booted_before_boots_sooner_than_in_qemu,
        a_file_of_a_shared_folder_is_read_with_few_exits,
        shared_folders_take_less_time_than_with_virtiofsd,
        monitoring_every_second_costs_less_than_a_thousandth,
        starvation_is_reported_within_a_tenth_of_a_second,
        a_sample_from_outside_costs_little,
    ];
    [second_tier([of_counters.clone(), others].concat()), third_tier(on_intel(of_counters))].concat()
}

/// Limits for one PMU model.
struct Limits {
    pmu: &'static str,
    /// Recorded costs in instructions of host and guest together, the sandbox included: a read, a task switch with one
    /// and with six counters, a sample of one event, a sample while six events are sampled.
    instructions: [i64; 5],
}

/// Divisor of the tolerance: a cost may exceed the recorded one by a twentieth.
const TOLERANCE: i64 = 20;

/// Exits to user space for a sample of a user-mode event: one for the overflow alarm. The guest's other register
/// accesses go to the shared page.
const SAMPLE: i64 = 1;
/// The system call beside `KVM_RUN` for a sample, which takes the signal.
const SAMPLE_CALL: &str = "rt_sigtimedwait";
/// Exits to user space for a task switch: the counters of each of the two tasks are frozen and thawed.
const SWITCH: i64 = 4;

/// Returns the limits on the current test's host.
fn limits() -> &'static [Limits; 2] {
    match host::current() {
        Host::Amd => &ON_AMD,
        Host::Intel => &ON_INTEL,
    }
}

static ON_AMD: [Limits; 2] = [
    Limits { pmu: "amd", instructions: [6_301, 31_959, 51_002, 15_556, 20_728] },
    Limits { pmu: "intel", instructions: [6_165, 31_922, 50_362, 16_204, 21_102] },
];

static ON_INTEL: [Limits; 2] = [
    Limits { pmu: "intel", instructions: [6_090, 31_630, 49_357, 17_562, 21_216] },
    Limits { pmu: "amd", instructions: [6_013, 30_389, 48_714, 12_912, 16_906] },
];

/// Exits to user space and system calls for a sample of cycles at a rate, kernel included, on average. One handler of
/// sixteen is measured, which takes two exits more, and so does each tick of the guest's clock, at which Linux changes
/// the period.
const AT_A_RATE_USER_EXITS: f64 = 1.5;
const AT_A_RATE_CALLS: f64 = 3.0;
/// Instructions of host and guest for it.
const AT_A_RATE_INSTRUCTIONS: f64 = 18_968.0 * 1.05;

/// Maximum virtual time from the start of `tally run -- echo hello` to its output, and from there to the prompt, when
/// the guest starts from a template.
const HELLO_SECONDS: f64 = 0.15;
const PROMPT_SECONDS: f64 = 0.05;
/// Maximum virtual time in which a guest of 512 MiB is saved, and from the start of `tally run --restore` to its first
/// output; and the size of the folder.
const SAVING_SECONDS: f64 = 0.35;
const RESTORING_SECONDS: f64 = 0.2;
const SAVED_KIB: u64 = 130 << 10;
/// Maximum number of instructions until the prompt is back, host and guest together, and of pages of memory that the
/// guest from a template takes beside those that it shares: some 890, and a large page of 512 or none.
const HELLO_INSTRUCTIONS: u64 = 39_000_000;
const HELLO_PAGES: u64 = 1_400;
/// Maximum number of exits to user space from the start of `tally run --boot -- echo hello` to its end, and of
/// instructions until the prompt is back.
const BOOT_EXITS: u64 = 400;
const BOOT_INSTRUCTIONS: u64 = 850_000_000;
/// Maximum number of exits to user space for reading a file of 100 MiB from a shared folder.
const SHARE_EXITS: u64 = 300;

static FIGURES: OnEachHost<Vec<Figures>> = OnEachHost::new(|| {
    let processor = match host::current() {
        Host::Amd => Processor::Amd,
        Host::Intel => Processor::Intel,
    };
    let programs = Programs { tally: program("tally"), workload: program("pmu-workload") };
    let pmus = limits().each_ref().map(|limits| limits.pmu);
    measure(processor, &pmus, &programs, &mut Progress::stderr("lab"))
        .unwrap_or_else(|error| panic!("{error}"))
});

fn measured() -> impl Iterator<Item = (&'static Limits, &'static Figures)> {
    limits().iter().zip(FIGURES.iter())
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

fn a_sample_costs_one_system_call_beside_the_entry() {
    for (Limits { pmu, .. }, figures) in measured() {
        let calls = figures.calls(Work::Overflow, 1);
        assert_eq!(calls, [(SAMPLE_CALL.to_owned(), PerUnit::whole(1))], "{pmu}");
    }
}

/// What `perf record` does by itself: cycles, the kernel's too, 4,000 samples a second.
static AT_A_RATE: LazyLock<Cost> = LazyLock::new(|| {
    let measure = "rate:4000:1".parse().expect("it is a measurement");
    let row = Row::new(Workload::Loop, measure, Length::Short);
    let (column, limit) = (Column::Tally("amd"), Limit::Default);
    let plan = Plan {
        host: Processor::Amd,
        rows: vec![row],
        columns: vec![column],
        limits: vec![limit],
        repeat: 1,
        counts: true,
    };
    let programs = bench::Programs { tally: program("tally"), workload: program("bench-workload") };
    let figures = bench::in_the_lab(&plan, &programs, &mut Progress::stderr("lab"));
    let figures = figures.unwrap_or_else(|error| panic!("{error}"));
    figures.cost((limit, column, row)).expect("it was measured")
});

fn a_sample_of_cycles_at_a_rate_is_seldom_more_than_one_exit() {
    let Cost { nanoseconds, counts: Some([_, user_exits, calls]), .. } = *AT_A_RATE else {
        panic!("{AT_A_RATE:?}")
    };
    assert!(user_exits < AT_A_RATE_USER_EXITS && calls < AT_A_RATE_CALLS, "{AT_A_RATE:?}");
    assert!(nanoseconds < AT_A_RATE_INSTRUCTIONS, "{AT_A_RATE:?}");
}

fn a_task_switch_costs_four_exits_to_user_space_and_no_other_system_call() {
    for (Limits { pmu, .. }, figures) in measured() {
        for events in [1, 6] {
            let runs = cost(figures, Work::Switch, events, &Quantity::Runs);
            assert_eq!(runs, PerUnit::whole(SWITCH), "{pmu}: with {events} counters");
            assert_eq!(figures.calls(Work::Switch, events), [], "{pmu}: with {events} counters");
        }
    }
}

fn no_operation_costs_more_instructions_than_recorded() {
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

static USE: LazyLock<commands::Figures> = LazyLock::new(|| {
    commands::measure(&program("tally"), &mut Progress::stderr("lab"))
        .unwrap_or_else(|error| panic!("{error}"))
});

fn a_command_costs_fewer_exits_than_in_qemu() {
    let [_, _, tally, _, peers @ ..] = &USE.hellos[..] else { panic!("nothing was measured") };
    assert_eq!((tally.monitor.as_str(), peers.len()), ("tally,boot", 2));
    assert!(tally.end.exits <= BOOT_EXITS && tally.total.instructions <= BOOT_INSTRUCTIONS, "{tally:?}");
    for peer in peers {
        assert!(
            tally.first.exits < peer.first.exits && tally.end.exits < peer.end.exits,
            "{tally:?} {peer:?}"
        );
    }
}

fn a_command_answers_in_a_seventh_of_a_second() {
    let [tally, ..] = &USE.hellos[..] else { panic!("nothing was measured") };
    assert_eq!(tally.monitor, "tally");
    assert!(tally.first.seconds <= HELLO_SECONDS, "{tally:?}");
    assert!(tally.end.seconds - tally.first.seconds <= PROMPT_SECONDS, "{tally:?}");
    assert!(tally.total.instructions <= HELLO_INSTRUCTIONS, "{tally:?}");
    assert!(tally.total.pages <= HELLO_PAGES, "{tally:?}");
}

fn a_snapshot_is_written_and_restored_in_half_a_second() {
    let [_, restored, ..] = &USE.hellos[..] else { panic!("nothing was measured") };
    assert_eq!(restored.monitor, "tally,restored");
    let commands::SnapshotCost { seconds, kib } = USE.saving;
    assert!(
        seconds <= SAVING_SECONDS && restored.first.seconds <= RESTORING_SECONDS,
        "{:?} {restored:?}",
        USE.saving
    );
    // What the guest never touched takes no space.
    assert!(kib < SAVED_KIB, "{kib}");
}

fn a_kernel_that_was_booted_before_boots_sooner_than_in_qemu() {
    let [_, _, boot, kernel, peers @ ..] = &USE.hellos[..] else { panic!("nothing was measured") };
    assert_eq!(kernel.monitor, "tally,kernel");
    for peer in peers {
        assert!(boot.first.seconds < peer.first.seconds, "{boot:?} {peer:?}");
        assert!(kernel.first.seconds < peer.first.seconds, "{kernel:?} {peer:?}");
    }
}

/// Work in a shared folder, with Tally and with virtiofsd.
static SHARES: LazyLock<Vec<Measured>> = LazyLock::new(|| {
    shares::measure(
        &program("tally"),
        &program("share-workload"),
        &[Monitor::Tally, Monitor::Virtiofsd],
        &mut Progress::stderr("lab"),
    )
    .unwrap_or_else(|error| panic!("{error}"))
});

/// Returns the costs of some work with each.
fn costs_of(work: shares::Work) -> [commands::Cost; 2] {
    let costs: Vec<_> = SHARES.iter().filter(|measured| measured.work == work).map(|one| one.cost).collect();
    costs.try_into().unwrap_or_else(|costs| panic!("{}: {costs:?}", work.name))
}

fn a_file_of_a_shared_folder_is_read_with_few_exits() {
    for work in &shares::WORKS[..2] {
        let [tally, _] = costs_of(*work);
        assert!(tally.exits <= SHARE_EXITS, "{}: {tally:?}", work.name);
    }
}

/// Single small requests, one after the other, take as long or longer.
fn shared_folders_take_less_time_than_with_virtiofsd() {
    let is_meant = |name: &str| !name.ends_with("x 4 KiB at random") && !name.ends_with("x 4 KiB");
    for work in shares::WORKS.into_iter().filter(|work| is_meant(work.name)) {
        let [tally, peer] = costs_of(work);
        assert!(tally.seconds < peer.seconds, "{}: {tally:?} {peer:?}", work.name);
    }
}

static ATTENTION: LazyLock<attention::Figures> = LazyLock::new(|| {
    let programs = attention::Programs { tally: program("tally"), thief: program("counter-thief") };
    let extent = attention::Extent { counters: &[1], seconds: 3 };
    attention::measure(extent, &programs, &mut Progress::stderr("lab"))
        .unwrap_or_else(|error| panic!("{error}"))
});

fn monitoring_every_second_costs_less_than_a_thousandth() {
    assert_eq!(ATTENTION.prices.len(), 3);
    for price in &ATTENTION.prices {
        assert!(price.per_second < MAX_PER_SECOND, "{price:?}");
    }
}

fn starvation_is_reported_within_a_tenth_of_a_second() {
    assert!(!ATTENTION.reports.is_empty());
    assert!(ATTENTION.reports.iter().all(|after| *after < SOON), "{:?}", ATTENTION.reports);
}

/// The most that a sample from outside, with callers, may cost a guest: while a program runs, 1.5 % at a thousand
/// samples a second; while its kernel does, a twentieth more than was recorded.
const OUTSIDE: [(&str, u64); 2] = [("a program", 15_000), ("its kernel", 17_060 / 20 * 21)];

fn a_sample_from_outside_costs_little() {
    let figures =
        outside::measure(&program("tally"), &mut Progress::stderr("lab")).expect("it can be measured");
    for (work, most) in OUTSIDE {
        let of_work =
            figures.iter().filter(|figure| figure.work == work && figure.sampler.contains("callers"));
        let costs: Vec<u64> = of_work.map(|figure| figure.per_sample).collect();
        assert!(matches!(costs[..], [cost] if cost <= most), "{work}: {costs:?}, at most {most}");
    }
}

/// Memory that a sleeping guest of a template may take of the host.
const MAX_KIB_EACH: u64 = 8 << 10;

fn a_hundred_guests_run_on_one_host_and_are_told_apart() {
    let figures = fleet::measure(&program("tally"), &mut Progress::stderr("lab")).expect("they run");
    let names: BTreeSet<String> = (1..=GUESTS).map(|number| format!("guest{number}")).collect();
    assert_eq!(figures.names, names);
    assert_eq!(figures.processes.len(), GUESTS);
    assert_eq!((figures.with_metrics, figures.silent), (GUESTS, Some(0)));
    assert!(figures.kib_each < MAX_KIB_EACH, "{figures:?}");
    // Those that work are in place of some that slept, and their kernels' functions have names.
    assert_eq!(figures.top.vms, [GUESTS; 2]);
    assert!(figures.top.named > 0, "{figures:?}");
}
