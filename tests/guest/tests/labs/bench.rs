//! The benchmark itself, on the smallest selection that says something: its numbers are what they have to be where that is
//! known, and its table has them all.

use std::sync::LazyLock;

use guest_images::Progress;
use guest_tests::program;
use guest_tests::suite::{Test, second_tier};
use guest_tests::tests;
use tally_lab::bench::{
    self, Column, Cost, Figures, Limit, Measure, Model, Plan, Programs, Row, Samples, Workload,
};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    second_tier(tests![
        every_sample_that_a_count_implies_is_taken_on_the_host_and_in_tallys_guest,
        a_sampling_point_costs_the_host_least_and_guests_their_exits,
        a_table_has_a_column_for_everything_and_says_what_it_does_not_know,
        a_pmu_that_nobody_uses_costs_nothing,
    ])
}

/// A loop of 500 sampling points of six events.
const PERIOD: u64 = 100_000;
const POINTS: u64 = 500;
const EVENTS: u8 = 6;

static PLAN: LazyLock<Plan> = LazyLock::new(|| {
    let measure = format!("record:{PERIOD}:{EVENTS}").parse().expect("it is a measurement");
    Plan {
        rows: vec![Row { workload: Workload::Loop, units: POINTS * PERIOD, measure }],
        columns: vec![Column::Host, Column::Tally("amd"), Column::Kvm],
        limits: vec![Limit::None],
        repeat: 1,
        counts: true,
    }
});

fn measured(plan: &Plan) -> Figures {
    let programs = Programs { tally: program("tally"), workload: program("bench-workload") };
    bench::in_the_lab(plan, &programs, &mut Progress::stderr("lab")).unwrap_or_else(|error| panic!("{error}"))
}

static FIGURES: LazyLock<Figures> = LazyLock::new(|| measured(&PLAN));

fn samples(column: Column) -> Samples {
    FIGURES.samples((Limit::None, column, PLAN.rows[0])).expect("samples were taken")
}

fn cost(column: Column) -> Cost {
    FIGURES.cost((Limit::None, column, PLAN.rows[0])).expect("it costs something")
}

fn every_sample_that_a_count_implies_is_taken_on_the_host_and_in_tallys_guest() {
    for column in [Column::Host, Column::Tally("amd")] {
        let Samples { taken, implied, at_once } = samples(column);
        assert!((at_once - f64::from(EVENTS)).abs() < f64::EPSILON, "{column}: {at_once} at once");
        assert!((taken - implied).abs() < f64::EPSILON, "{column}: {taken} of {implied}");
    }
    assert!(samples(Column::Tally("amd")).taken >= samples(Column::Kvm).taken);
}

fn a_sampling_point_costs_the_host_least_and_guests_their_exits() {
    let [host, tally, kvm] = [Column::Host, Column::Tally("amd"), Column::Kvm].map(cost);
    for guest in [tally, kvm] {
        assert!(host.nanoseconds < guest.nanoseconds, "{host:?} {guest:?}");
    }
    assert_eq!(host.counts, None, "a host has no exits");
    let [exits, user_exits, calls] = tally.counts.expect("exits were counted");
    assert!(exits >= user_exits && user_exits >= 1.0 && calls >= user_exits, "{tally:?}");
    let [exits, user_exits, _] = kvm.counts.expect("exits were counted");
    assert!(exits >= 6.0 && user_exits < 1.0, "{kvm:?}");
}

fn a_table_has_a_column_for_everything_and_says_what_it_does_not_know() {
    let table = bench::table(&PLAN, &FIGURES, Some(Model::PUBLISHED));
    let row = |what: &str| {
        let line =
            table.lines().find(|line| line.contains(what)).unwrap_or_else(|| panic!("{what}: {table}"));
        line.trim_matches('|').split('|').skip(1).map(|cell| cell.trim().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(row("perf_cpu_time_max_percent"), ["`l1`", "`amd`", "`kvm`"]);
    assert_eq!(row("samples taken")[0], "3,000, 3,000");
    for what in [": slowdown", ": modelled slowdown", "instructions for a sampling point", "start and end"] {
        assert!(row(what).iter().all(|cell| cell != "-"), "{table}");
    }
    assert_eq!(row("exits for a sampling point")[0], "-");
    assert!(table.contains("540 ns for each exit") && table.contains("https://lkml"), "{table}");
}

fn a_pmu_that_nobody_uses_costs_nothing() {
    /// A guest's clock interrupts it every four milliseconds, and where its first does in a workload is chance: one more or less.
    /// What a kernel does every second or so is in one of the runs, and not in the one in the middle.
    const EXITS_OF_A_TICK: u64 = 8;
    const NANOSECONDS_OF_A_TICK: f64 = 30_000.0;
    let row = |(workload, units)| Row { workload, units, measure: Measure::Nothing };
    let plan = Plan {
        // What accesses no register: the code in front of the kernel's functions for these is not for nothing.
        rows: [(Workload::Loop, 50_000_000), (Workload::Syscalls, 30_000)].map(row).to_vec(),
        // Not Intel's: a kernel that takes its processor for Intel's guards itself otherwise.
        columns: vec![Column::Tally("none"), Column::Tally("amd")],
        limits: vec![Limit::None],
        repeat: 5,
        counts: true,
    };
    let figures = measured(&plan);
    for &row in &plan.rows {
        let took = |column| {
            let (time, counts) = figures.took((Limit::None, column, row)).expect("it was measured");
            (time, counts.expect("this, too"))
        };
        let [(without, none), (with, amd)] = [Column::Tally("none"), Column::Tally("amd")].map(took);
        assert!((with - without).abs() < NANOSECONDS_OF_A_TICK, "{row}: {with} instead of {without} ns");
        for (with, without) in
            [(amd.exits, none.exits), (amd.user_exits, none.user_exits), (amd.calls, none.calls)]
        {
            assert!(with.abs_diff(without) <= EXITS_OF_A_TICK, "{row}: {amd:?} instead of {none:?}");
        }
    }
}
