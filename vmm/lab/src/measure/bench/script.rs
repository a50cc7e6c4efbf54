//! The scripts of the benchmark. The measuring script runs on the host and in every guest. The main script runs the
//! measuring script in each of these places, one after the other on the same host.

use std::fmt::Write;

use super::plan::{Column, Events, Measure, Row};
use crate::scenario::peer::{self, MachineType};
use crate::scenario::programs::ON_INTEL;
use crate::simulator::board::Processor;

const MEASURE: &str = include_str!("measure.sh");
const EVERYWHERE: &str = include_str!("everywhere.sh");

/// The kernel's limit for the time that samples take. A kernel that reaches the limit lowers the sampling rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Limit {
    /// A quarter of the time, which is the default.
    Default,
    /// No limit.
    None,
}

impl Limit {
    /// Both limits.
    pub const ALL: [Self; 2] = [Self::Default, Self::None];

    /// Returns the limit's name, which is part of file names.
    pub fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::None => "none",
        }
    }

    /// Returns the value of `perf_cpu_time_max_percent`.
    fn percent(self) -> u8 {
        match self {
            Self::Default => 25,
            Self::None => 0,
        }
    }
}

/// The measurements to make.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Processor of the simulated host.
    pub host: Processor,
    /// Rows of the table: what is measured.
    pub rows: Vec<Row>,
    /// Columns of the table: where it is measured.
    pub columns: Vec<Column>,
    /// Limits, with a table for each.
    pub limits: Vec<Limit>,
    /// Number of runs of each row.
    pub repeat: u32,
    /// The host's exits and system calls are counted too, in additional boots of the guests.
    pub counts: bool,
}

impl Plan {
    /// Returns the limits with which at least one row is run.
    pub fn used_limits(&self) -> impl Iterator<Item = Limit> {
        self.limits.iter().copied().filter(|limit| !self.runs(*limit).is_empty())
    }

    /// Returns the rows that are run with this limit. The rows with which a row is compared come before it.
    pub fn runs(&self, limit: Limit) -> Vec<Row> {
        let mut runs = Vec::new();
        // The limit affects only rows that take samples. The others are run with the first limit.
        let depends_on_limit = |row: &&Row| row.measure.samples() || self.limits.first() == Some(&limit);
        for &row in self.rows.iter().filter(depends_on_limit) {
            for row in [Some(row.base()), row.counting(), Some(row)].into_iter().flatten() {
                if !runs.contains(&row) {
                    runs.push(row);
                }
            }
        }
        runs
    }

    /// Returns the name and the text of the measuring script.
    pub fn measuring_script(&self, limit: Limit) -> (String, String) {
        let events = self.events();
        let mut script = format!("percent={} repeat={}\n{MEASURE}", limit.percent(), self.repeat);
        for row in self.runs(limit) {
            let Row { workload, units, measure } = row;
            let read = if let Measure::Read(_) = measure { format!(" {measure}") } else { String::new() };
            writeln!(script, "measure {row} '{workload} {units}{read}' {}", measure.command(events))
                .expect("writing to a string cannot fail");
        }
        (format!("measure-{}", limit.name()), script)
    }

    /// Returns the main script, which runs the measuring scripts on the host and in the guests. For each run it prints
    /// `begin NAME`, the output, and `end of this`.
    pub fn main_script(&self) -> String {
        let mut script = EVERYWHERE.to_owned();
        for limit in self.used_limits() {
            for &column in &self.columns {
                let mut line = |function: &str, name: &str, extra: &str| {
                    let command = command(column, limit, extra);
                    writeln!(script, "limit {}\n{function} {name} {command}", limit.name())
                        .expect("writing to a string cannot fail");
                };
                line("measured", &Section::times(limit, column), "");
                if self.counts && column != Column::Host {
                    let marks =
                        if self.host == Processor::Intel { &format!("mark {ON_INTEL}") } else { "mark" };
                    line("counted", &Section::counts(limit, column), marks);
                }
            }
        }
        script + "results\n"
    }

    fn events(&self) -> Events {
        let is_intel = |column: &Column| matches!(column, Column::Tally(pmu) if pmu.starts_with("intel"));
        if self.columns.iter().any(is_intel) { Events::Alternating } else { Events::Instructions }
    }
}

/// Sections of the main script's output.
pub struct Section;

impl Section {
    /// Returns the name of the section with the workloads' times.
    pub fn times(limit: Limit, column: Column) -> String {
        format!("{column}.{}.times", limit.name())
    }

    /// Returns the name of the section with the host's exits and system calls.
    pub fn counts(limit: Limit, column: Column) -> String {
        format!("{column}.{}.counts", limit.name())
    }

    /// Returns the text of a section.
    pub fn find<'a>(text: &'a str, name: &str) -> Option<&'a str> {
        let (_, rest) = text.split_once(&format!("begin {name}\n"))?;
        Some(rest.split_once("end of this\n")?.0)
    }
}

/// Returns the command that runs the measuring script in the place of a column.
fn command(column: Column, limit: Limit, extra: &str) -> String {
    let script = format!("./measure-{}", limit.name());
    match column {
        // perf and the workload share one CPU, as in a guest with one vCPU.
        Column::Host => format!("taskset 1 sh {script} '{extra}'"),
        Column::Tally(pmu) => {
            format!("./tally run --boot --pmu {pmu} -- sh {script} '{extra}'")
        }
        Column::Mediated => format!("mediated {}", command(Column::Tally("kvm"), limit, extra)),
        // With `debug-threads`, the vCPU's thread has a name, by which the main script finds it.
        Column::Kvm => {
            peer::linux(MachineType::Default, &["sh", &script, extra]) + " -name bench,debug-threads=on"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::bench::plan::{Length, Workload};

    fn plan(measures: &[&str]) -> Plan {
        let row = |text: &&str| Row::new(Workload::Loop, text.parse().unwrap(), Length::Usual);
        Plan {
            host: Processor::Amd,
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
    fn a_row_runs_after_those_that_it_is_compared_with_and_with_both_limits_only_if_it_samples() {
        let plan = plan(&["stat:1", "record:1000000:6"]);
        assert_eq!(measures(&plan, Limit::Default), ["nothing", "stat:1", "stat:6", "record:1000000:6"]);
        assert_eq!(measures(&plan, Limit::None), ["nothing", "stat:6", "record:1000000:6"]);
    }

    #[test]
    fn a_limit_that_affects_no_row_is_not_used() {
        let plan = plan(&["stat:1", "read"]);
        assert_eq!(plan.used_limits().collect::<Vec<_>>(), [Limit::Default]);
        assert!(!plan.main_script().contains("limit none"));
    }

    #[test]
    fn everything_is_printed_under_a_name_of_its_own() {
        let script = plan(&["record:1000000:6"]).main_script();
        for name in ["l1.default.times taskset 1 sh", "kvm.none.times qemu", "kvm.none.counts qemu"] {
            assert_eq!(script.matches(name).count(), 1, "{name}");
        }
        assert!(!script.contains("l1.none.counts"), "a host has no exits");
    }
}
