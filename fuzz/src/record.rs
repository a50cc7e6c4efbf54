//! A table in the documentation of how long each target has run, and what that has shown. Each run adds to its target's
//! row, so that long runs can be made of several.
//!
//! | target | minutes | executions | edges | findings | last |
//! |---|---|---|---|---|---|
//! | `share` | 120 | 5000000 | 4000 | 0 | 2026-01-31, 0123abc |

use std::fs;
use std::path::Path;

use tally_lab::published::{commit, date};

use crate::{Error, Outcome, Result, file};

/// Checks that a file has a row for a target.
pub fn has_row(path: &Path, target: &'static str) -> Result<()> {
    let text = fs::read_to_string(path).map_err(file(path))?;
    let found = text.lines().any(|line| Row::of(line, target).is_some());
    if found { Ok(()) } else { Err(Error::NoRow { path: path.to_owned(), target }) }
}

/// Adds outcomes to their targets' rows in a file.
pub fn record(path: &Path, outcomes: &[Outcome]) -> Result<()> {
    let text = fs::read_to_string(path).map_err(file(path))?;
    let stamp = format!("{}, {}", date()?, commit(path)?);
    fs::write(path, added(&text, outcomes, &stamp)).map_err(file(path))
}

fn added(text: &str, outcomes: &[Outcome], stamp: &str) -> String {
    let line = |line: &str| {
        let row = outcomes.iter().find_map(|outcome| Some(Row::of(line, outcome.target)?.and(outcome)));
        row.map_or_else(|| line.to_owned(), |row| row.line(stamp)) + "\n"
    };
    text.lines().map(line).collect()
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
        let mut cells = line.strip_prefix("| ")?.split(" | ");
        let is_its = cells.next()?.trim_matches('`') == target;
        let mut number = || cells.next()?.parse().ok();
        let row =
            Self { target, minutes: number()?, executions: number()?, edges: number()?, findings: number()? };
        is_its.then_some(row)
    }

    /// Adds an outcome. Edges are those of all inputs that were kept, so the last number stands.
    fn and(self, outcome: &Outcome) -> Self {
        Self {
            minutes: self.minutes + (outcome.ran.as_secs() + 30) / 60,
            executions: self.executions + outcome.executions,
            edges: outcome.edges,
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

    use super::*;

    const TEXT: &str =
        "# Runs\n| `pmu` | 5 | 100 | 7 | 1 | never |\n| `share` | 0 | 0 | 0 | 0 |  |\n`pmu` is one.\n";

    fn outcome(target: &'static str) -> Outcome {
        let ran = Duration::from_secs(119);
        Outcome { target, ran, executions: 11, edges: 8, new_inputs: 3, finding: None }
    }

    #[test]
    fn a_run_is_added_to_its_targets_row_only() {
        let expected = TEXT.replace("| 5 | 100 | 7 | 1 | never |", "| 7 | 111 | 8 | 1 | today |");
        assert_eq!(added(TEXT, &[outcome("pmu"), outcome("operator")], "today"), expected);
    }

    #[test]
    fn a_file_without_a_row_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("runs.md");
        fs::write(&path, TEXT).unwrap();
        has_row(&path, "share").unwrap();
        let error = has_row(&path, "operator").unwrap_err();
        assert!(error.to_string().ends_with("runs.md has no row for operator"));
    }
}
