//! A table in the documentation of how long each target has run, and what that has shown. Each run adds to its target's
//! row, so that long runs can be made of several.
//!
//! | target | CPU minutes | executions | edges | findings | last run |
//! |---|---:|---:|---:|---:|---|
//! | `share` | 120 | 5000000 | 4000 | 0 | 2026-01-31, 0123abc |

use std::fs;
use std::path::{Path, PathBuf};

use fuzz_targets::Target;
use tally_lab::published::{commit, date};

use crate::{Error, Outcome, Result, file};

/// A file with such a table.
pub struct Record {
    path: PathBuf,
    /// Date and commit of what runs.
    stamp: String,
}

impl Record {
    /// Takes the date and the commit, and checks that the file has a row for each of these targets. To be called before
    /// the targets are compiled.
    pub fn new(path: &Path, targets: &[&'static Target]) -> Result<Self> {
        let text = fs::read_to_string(path).map_err(file(path))?;
        for Target { name, .. } in targets {
            if !text.lines().any(|line| Row::of(line, name).is_some()) {
                return Err(Error::NoRow { path: path.to_owned(), target: name });
            }
        }
        let stamp = format!("{}, {}", date()?, commit(path)?);
        Ok(Self { path: path.to_owned(), stamp })
    }

    /// Adds an outcome to its target's row.
    pub fn add(&self, outcome: &Outcome) -> Result<()> {
        let text = fs::read_to_string(&self.path).map_err(file(&self.path))?;
        fs::write(&self.path, added(&text, outcome, &self.stamp)).map_err(file(&self.path))
    }
}

fn added(text: &str, outcome: &Outcome, stamp: &str) -> String {
    let line = |line: &str| {
        let row = Row::of(line, outcome.target);
        row.map_or_else(|| line.to_owned(), |row| row.and(outcome).line(stamp)) + "\n"
    };
    text.lines().map(line).collect()
}

/// Returns the row of a target that has not run yet.
pub fn empty_row(target: &str) -> String {
    Row { target, minutes: 0, executions: 0, edges: 0, findings: 0 }.line("")
}

/// A target's row.
struct Row<'a> {
    target: &'a str,
    minutes: u64,
    executions: u64,
    edges: u64,
    findings: u64,
}

impl<'a> Row<'a> {
    /// Reads a line, if it is the row of this target.
    fn of(line: &str, target: &'a str) -> Option<Self> {
        let mut cells = line.strip_prefix('|')?.split('|').map(str::trim);
        let is_its = cells.next()?.trim_matches('`') == target;
        let mut number = || cells.next()?.parse().ok();
        let row =
            Self { target, minutes: number()?, executions: number()?, edges: number()?, findings: number()? };
        is_its.then_some(row)
    }

    /// Adds an outcome. A run begins with the inputs that earlier runs have kept, but only with those of this machine.
    /// So the most edges stand that any run has reached.
    fn and(self, outcome: &Outcome) -> Self {
        Self {
            minutes: self.minutes + outcome.minutes(),
            executions: self.executions + outcome.executions,
            edges: self.edges.max(outcome.edges.unwrap_or(0)),
            findings: self.findings + u64::from(outcome.finding.is_some()),
            ..self
        }
    }

    fn line(&self, stamp: &str) -> String {
        let Self { target, minutes, executions, edges, findings } = self;
        format!("| `{target}` | {minutes} | {executions} | {edges} | {findings} | {stamp} |")
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use fuzz_targets::{TARGETS, target};

    use super::*;

    const TEXT: &str =
        "# Runs\n| `pmu` | 5 | 100 | 7 | 1 | never |\n| `share` | 0 | 0 | 0 | 0 |  |\n`pmu` is one.\n";

    fn outcome(edges: Option<u64>) -> Outcome {
        let ran = Duration::from_secs(119);
        Outcome { target: "pmu", ran, executions: 11, edges, new_inputs: 3, finding: None }
    }

    #[test]
    fn a_run_is_added_to_its_targets_row_only() {
        let expected = TEXT.replace("| 5 | 100 | 7 | 1 | never |", "| 7 | 111 | 8 | 1 | today |");
        assert_eq!(added(TEXT, &outcome(Some(8)), "today"), expected);
    }

    #[test]
    fn edges_stay_as_they_are_after_a_run_that_reached_fewer() {
        for edges in [None, Some(6)] {
            assert!(added(TEXT, &outcome(edges), "today").contains("| `pmu` | 7 | 111 | 7 | 1 | today |"));
        }
    }

    #[test]
    fn every_target_has_a_row_in_the_documentation() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../SECURITY.md");
        let text = fs::read_to_string(path).unwrap();
        for Target { name, .. } in TARGETS {
            assert!(text.lines().any(|line| Row::of(line, name).is_some()), "{name}");
        }
    }

    #[test]
    fn a_file_without_a_row_is_refused_with_the_row_to_add() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("runs.md");
        fs::write(&path, TEXT).unwrap();
        let Err(error) = Record::new(&path, &[target("operator").unwrap()]) else { panic!("it is accepted") };
        let text = error.to_string();
        assert!(text.ends_with("has no row for operator: add `| `operator` | 0 | 0 | 0 | 0 |  |`"), "{text}");
    }
}
