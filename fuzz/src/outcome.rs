//! What a run of libFuzzer has found, from what it prints.

use std::path::PathBuf;
use std::time::Duration;

use fuzz_targets::Target;

/// Result of a run.
#[derive(Debug, PartialEq, Eq)]
pub struct Outcome {
    pub target: &'static str,
    /// Time for which it ran on a processor.
    pub ran: Duration,
    /// Number of inputs on which it was run.
    pub executions: u64,
    /// Number of edges of the code that inputs have reached, those of earlier runs among them. `None` if it has ended
    /// before all of these were loaded.
    pub edges: Option<u64>,
    /// Number of inputs that have reached something new.
    pub new_inputs: u64,
    /// The finding that has ended the run, if there is one.
    pub finding: Option<Finding>,
}

/// An input with which something happens that must not.
#[derive(Debug, PartialEq, Eq)]
pub struct Finding {
    pub input: PathBuf,
    pub what: String,
}

impl Outcome {
    /// Reads what libFuzzer has printed. Returns `None` if it has failed itself.
    pub fn of(target: &'static Target, log: &str, ran: Duration, has_succeeded: bool) -> Option<Self> {
        let statistic = |name: &str| {
            let line = log.lines().rev().find_map(|line| line.strip_prefix("stat::")?.strip_prefix(name))?;
            line.trim_start_matches(':').trim().parse().ok()
        };
        let reached = |line: &str| {
            let (_, rest) = line.split_once(" cov: ")?;
            rest.split_whitespace().next()?.parse().ok()
        };
        // Lines begin with the number of executions, `#1234`.
        let executed =
            |line: &str| line.strip_prefix('#')?.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok();
        let last_line = || log.lines().rev().find_map(executed);
        let finding = finding(log);
        if !has_succeeded && finding.is_none() {
            return None;
        }
        Some(Self {
            target: target.name,
            ran,
            executions: statistic("number_of_executed_units").or_else(last_line).unwrap_or(0),
            edges: log.lines().rev().find_map(reached),
            new_inputs: statistic("new_units_added").unwrap_or(0),
            finding,
        })
    }

    /// Returns the time for which it ran on a processor, in minutes.
    pub fn minutes(&self) -> u64 {
        (self.ran.as_secs() + 30) / 60
    }
}

/// Returns the finding that libFuzzer has written.
fn finding(log: &str) -> Option<Finding> {
    let written = log.lines().find_map(|line| line.split_once("Test unit written to "))?;
    // The message of a panic is in the line after the one that says where it was.
    let mut lines = log.lines();
    let panic = lines.find(|line| line.contains("panicked at ")).and_then(|place| {
        let place = place.split_once("panicked at ")?.1.trim_end_matches(':');
        Some(format!("{} ({place})", lines.next()?))
    });
    let error = || log.lines().find_map(|line| Some(line.split_once("ERROR: libFuzzer: ")?.1.to_owned()));
    Some(Finding { input: written.1.trim().into(), what: panic.or_else(error).unwrap_or_default() })
}

pub fn table(outcomes: &[Outcome]) -> String {
    let title = ["target", "CPU minutes", "executions", "edges", "new inputs", "findings"].map(str::to_owned);
    let row = |outcome: &Outcome| {
        let findings = usize::from(outcome.finding.is_some());
        [
            outcome.target.to_owned(),
            outcome.minutes().to_string(),
            outcome.executions.to_string(),
            outcome.edges.map_or_else(|| "-".to_owned(), |edges| edges.to_string()),
            outcome.new_inputs.to_string(),
            findings.to_string(),
        ]
    };
    let rows = std::iter::once(title).chain(outcomes.iter().map(row));
    let line = |[target, minutes, executions, edges, new_inputs, findings]: [String; 6]| {
        format!("{target:<8}{minutes:>12}{executions:>12}{edges:>12}{new_inputs:>12}{findings:>12}\n")
    };
    rows.map(line).collect()
}

#[cfg(test)]
mod tests {
    use fuzz_targets::TARGETS;

    use super::*;

    const RUN: &str = "\
INFO: Running with entropic power schedule (0xFF, 100).
#2\tINITED cov: 24 ft: 25 corp: 1/1b exec/s: 0 rss: 33Mb
#4097\tNEW    cov: 31 ft: 33 corp: 2/3b lim: 4 exec/s: 0 rss: 33Mb L: 2/2 MS: 1 InsertByte-
";

    #[test]
    fn a_run_without_findings_is_summed_up() {
        let log = format!(
            "{RUN}Done 5000 runs in 2 second(s)\nstat::number_of_executed_units: 5000\nstat::new_units_added:          7\n"
        );
        let outcome = Outcome::of(&TARGETS[0], &log, Duration::from_secs(125), true).unwrap();
        let expected = Outcome {
            target: TARGETS[0].name,
            ran: Duration::from_secs(125),
            executions: 5000,
            edges: Some(31),
            new_inputs: 7,
            finding: None,
        };
        assert_eq!(outcome, expected);
        assert_eq!(
            table(&[outcome]),
            "target   CPU minutes  executions       edges  new inputs    findings\n\
             agent              2        5000          31           7           0\n"
        );
    }

    #[test]
    fn a_finding_names_its_input_and_the_panic() {
        let log = format!(
            "{RUN}\nthread '<unnamed>' (7) panicked at devices/src/fs.rs:7:9:\nthe canary was read\nnote: run with\n\
             ==7== ERROR: libFuzzer: deadly signal\nartifact_prefix='/f/'; Test unit written to /f/crash-01\n"
        );
        let finding = Outcome::of(&TARGETS[0], &log, Duration::ZERO, false).unwrap().finding.unwrap();
        assert_eq!(finding.what, "the canary was read (devices/src/fs.rs:7:9)");
        assert_eq!(finding.input, PathBuf::from("/f/crash-01"));
    }

    #[test]
    fn an_input_that_takes_too_long_is_a_finding() {
        let log = format!(
            "{RUN}==7== ERROR: libFuzzer: timeout after 61 seconds\nartifact_prefix=''; Test unit written to timeout-02\n"
        );
        let finding = Outcome::of(&TARGETS[0], &log, Duration::ZERO, false).unwrap().finding.unwrap();
        assert_eq!(finding.what, "timeout after 61 seconds");
    }

    #[test]
    fn a_failure_of_libfuzzer_is_no_outcome() {
        assert_eq!(
            Outcome::of(&TARGETS[0], "ERROR: The required directory does not exist", Duration::ZERO, false),
            None
        );
    }
}
