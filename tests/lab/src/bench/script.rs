//! The scripts of the benchmark: one that measures, which is the same on the host and in every guest, and one that has it run
//! everywhere, one after the other on the same host.

use std::fmt::Write;

use super::plan::{Column, Events, Measure, Row};
use crate::peer::{self, Machine};

const MEASURE: &str = include_str!("measure.sh");
const EVERYWHERE: &str = include_str!("everywhere.sh");

/// How much of its time a kernel gives to samples. Where they take more, it takes fewer of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Limit {
    /// A quarter, which is the default.
    Default,
    /// All of it.
    None,
}

impl Limit {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Default, Self::None];

    /// As part of a file's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::None => "none",
        }
    }

    /// As `perf_cpu_time_max_percent` has it.
    fn percent(self) -> u8 {
        match self {
            Self::Default => 25,
            Self::None => 0,
        }
    }
}

/// What runs where.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The rows of the table.
    pub rows: Vec<Row>,
    /// Its columns.
    pub columns: Vec<Column>,
    /// The limits that it is made for.
    pub limits: Vec<Limit>,
    /// How often everything is done.
    pub repeat: u32,
    /// Whether what a host does for a guest is counted, too, in guests of their own.
    pub counts: bool,
}

impl Plan {
    /// What is run with this limit, each row behind those that it is compared with.
    pub fn runs(&self, limit: Limit) -> Vec<Row> {
        let mut runs = Vec::new();
        // Where nobody samples no limit matters.
        let of_this = |row: &&Row| row.measure.samples() || self.limits.first() == Some(&limit);
        for &row in self.rows.iter().filter(of_this) {
            for row in [Some(row.base()), row.census(), Some(row)].into_iter().flatten() {
                if !runs.contains(&row) {
                    runs.push(row);
                }
            }
        }
        runs
    }

    /// The script that measures, with its name.
    pub fn measuring(&self, limit: Limit) -> (String, String) {
        let events = self.events();
        let mut script = format!("percent={} repeat={}\n{MEASURE}", limit.percent(), self.repeat);
        for row in self.runs(limit) {
            let Row { workload, units, measure } = row;
            let read = if measure == Measure::Read { " read" } else { "" };
            writeln!(script, "measure {row} '{workload} {units}{read}' {}", measure.command(events))
                .expect("writing to a string cannot fail");
        }
        (format!("measure-{}", limit.name()), script)
    }

    /// The script that has it run everywhere. For each it prints `begin NAME`, what that printed, and `end`.
    pub fn everywhere(&self) -> String {
        let mut script = EVERYWHERE.to_owned();
        for &limit in &self.limits {
            for &column in &self.columns {
                let mut line = |function: &str, name: &str, extra: &str| {
                    let command = command(column, limit, extra);
                    writeln!(script, "limit {}\n{function} {name} {command}", limit.name())
                        .expect("writing to a string cannot fail");
                };
                line("measured", &Section::times(limit, column), "");
                if self.counts && column != Column::Host {
                    line("counted", &Section::counts(limit, column), "mark");
                }
            }
        }
        script + "results\n"
    }

    fn events(&self) -> Events {
        let intels = |column: &Column| matches!(column, Column::Tally(pmu) if pmu.starts_with("intel"));
        if self.columns.iter().any(intels) { Events::InTurn } else { Events::Instructions }
    }
}

/// The names of what is printed.
pub struct Section;

impl Section {
    /// The times that workloads took.
    pub fn times(limit: Limit, column: Column) -> String {
        format!("{column}.{}.times", limit.name())
    }

    /// What the host did meanwhile.
    pub fn counts(limit: Limit, column: Column) -> String {
        format!("{column}.{}.counts", limit.name())
    }

    /// What was printed under this name.
    pub fn find<'a>(text: &'a str, name: &str) -> Option<&'a str> {
        let (_, rest) = text.split_once(&format!("begin {name}\n"))?;
        Some(rest.split_once("end of this\n")?.0)
    }
}

/// What runs the measuring script there.
fn command(column: Column, limit: Limit, extra: &str) -> String {
    let script = format!("./measure-{}", limit.name());
    match column {
        // Like a guest with one CPU, which perf shares with the workload.
        Column::Host => format!("taskset 1 sh {script} '{extra}'"),
        Column::Tally(pmu) => {
            format!("./tally run --append cryptomgr.notests --pmu {pmu} -- sh {script} '{extra}'")
        }
        Column::Mediated => format!("mediated {}", command(Column::Tally("kvm"), limit, extra)),
        // So its threads have names.
        Column::Kvm => {
            peer::linux(Machine::Default, &["sh", &script, extra]) + " -name bench,debug-threads=on"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::plan::{Length, Workload};

    fn plan(measures: &[&str]) -> Plan {
        let row = |text: &&str| Row::new(Workload::Loop, text.parse().unwrap(), Length::Usual);
        Plan {
            rows: measures.iter().map(row).collect(),
            columns: vec![Column::Host, Column::Kvm],
            limits: Limit::ALL.to_vec(),
            repeat: 1,
            counts: true,
        }
    }

    fn measures(plan: &Plan, limit: Limit) -> Vec<String> {
        plan.runs(limit).iter().map(|row| row.measure.to_string()).collect()
    }

    #[test]
    fn a_row_runs_behind_those_that_it_is_compared_with_and_only_where_it_can_differ() {
        let plan = plan(&["stat:1", "record:1000000:6"]);
        assert_eq!(measures(&plan, Limit::Default), ["nothing", "stat:1", "stat:6", "record:1000000:6"]);
        assert_eq!(measures(&plan, Limit::None), ["nothing", "stat:6", "record:1000000:6"]);
    }

    #[test]
    fn everything_is_printed_under_a_name_of_its_own() {
        let script = plan(&["read"]).everywhere();
        for name in ["l1.default.times taskset 1 sh", "kvm.none.times qemu", "kvm.none.counts qemu"] {
            assert_eq!(script.matches(name).count(), 1, "{name}");
        }
        assert!(!script.contains("l1.none.counts"), "a host has no exits");
    }
}
