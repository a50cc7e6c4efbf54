//! Tests of the benchmark with a small plan: numbers that are known beforehand are right, and the table is complete.

use std::sync::LazyLock;

use guest_images::Progress;
use guest_tests::program;
use guest_tests::suite::{Test, second_tier};
use guest_tests::tests;
use tally_lab::Processor;
use tally_lab::bench::{
    self, Column, Cost, Figures, Limit, Measure, Model, Plan, Programs, Row, Samples, Workload,
};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    second_tier(tests![
        host_and_tallys_guest_take_every_sample_that_the_count_implies,
        a_sampling_point_costs_less_on_the_host_than_in_guests,
        the_table_is_complete_and_marks_unknown_values,
        an_unused_pmu_costs_nothing,
    ])
}

// The workload is a loop with 500 sampling points of six events.
const PERIOD: u64 = 100_000;
const POINTS: u64 = 500;
const EVENTS: u8 = 6;

static PLAN: LazyLock<Plan> = LazyLock::new(|| {
    let measure = format!("record:{PERIOD}:{EVENTS}").parse().expect("it is a measurement");
    Plan {
        host: Processor::Amd,
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

fn host_and_tallys_guest_take_every_sample_that_the_count_implies() {
    for column in [Column::Host, Column::Tally("amd")] {
        let Samples { taken, implied, at_once } = samples(column);
        assert!((at_once - f64::from(EVENTS)).abs() < f64::EPSILON, "{column}: {at_once} at once");
        assert!((taken - implied).abs() < f64::EPSILON, "{column}: {taken} of {implied}");
    }
    assert!(samples(Column::Tally("amd")).taken >= samples(Column::Kvm).taken);
}

fn a_sampling_point_costs_less_on_the_host_than_in_guests() {
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

fn the_table_is_complete_and_marks_unknown_values() {
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
    let summary = bench::summary(&PLAN, &FIGURES, Some(Model::PUBLISHED));
    let cells = summary.lines().find(|line| line.contains("loop, `record:")).expect("the row is there");
    let percents = cells.split('|').map(|cell| cell.matches(" %").count());
    assert_eq!(percents.collect::<Vec<_>>(), [0, 0, 1, 2, 2, 0], "{summary}");
    assert!(cells.contains(" %; 3,000 of 3,000 |"), "{summary}");
}

fn an_unused_pmu_costs_nothing() {
    /// Tolerance for the guest's timer interrupt, which comes every four milliseconds: a run may contain one more or
    /// less. Work that a kernel does about once per second is in one of the runs only, and so does not change the
    /// median.
    const EXITS_OF_A_TICK: u64 = 8;
    const NANOSECONDS_OF_A_TICK: f64 = 30_000.0;
    let row = |(workload, units)| Row { workload, units, measure: Measure::Nothing };
    let plan = Plan {
        host: Processor::Amd,
        // These workloads access no PMU registers. Accesses cost something, because the loader adds code to the
        // kernel's functions for them.
        rows: [(Workload::Loop, 50_000_000), (Workload::Syscalls, 30_000)].map(row).to_vec(),
        // Not with Intel's PMU: a kernel on an Intel processor enables other mitigations, and so has other costs.
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
