//! The report: counts beside the right ones, and what was measured. It is printed line by line as it comes about, or at
//! its end as JSON.

use std::io::{self, Write};
use std::process::ExitCode;

use serde::Serialize;

use crate::commands::check::Format;
use crate::host::printer::{self, Printer};

/// A count may be off by one in this many: many processors count an instruction that an interrupt breaks off, and the
/// guest does not choose when the host is interrupted.
const NOISE: u64 = 20_000;

/// A report. Its fields are the schema of `tally check --json`.
#[derive(Serialize)]
pub struct Report {
    facts: Vec<Fact>,
    counts: Vec<Count>,
    measured: Vec<Measured>,
    numbers: Vec<Number>,
    exact: usize,
    close: usize,
    wrong: usize,
    #[serde(skip)]
    out: Printer,
    #[serde(skip)]
    format: Format,
    /// What the counts that follow are of.
    #[serde(skip)]
    section: &'static str,
}

/// Something about the host or the guest.
#[derive(Serialize)]
struct Fact {
    about: &'static str,
    fact: String,
}

#[derive(Serialize)]
struct Count {
    section: &'static str,
    what: String,
    found: Option<u64>,
    right: u64,
}

#[derive(Serialize)]
struct Measured {
    section: &'static str,
    what: &'static str,
    #[serde(flatten)]
    distribution: Option<Distribution>,
}

/// What was counted, and may be any number.
#[derive(Serialize)]
struct Number {
    section: &'static str,
    what: String,
    found: u64,
}

/// How what was measured several times is distributed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Distribution {
    pub number: u64,
    pub least: u64,
    pub median: u64,
    /// 99 % are at most this much.
    pub percentile_99: u64,
    pub most: u64,
}

impl Distribution {
    /// Reads the numbers in the order of the fields.
    pub fn parse(text: &str) -> Option<Self> {
        let numbers: Vec<u64> = text.split(' ').map_while(|number| number.parse().ok()).collect();
        let [number, least, median, percentile_99, most] = numbers[..] else { return None };
        Some(Self { number, least, median, percentile_99, most })
    }

    /// Returns it with each value changed.
    pub fn map(self, change: impl Fn(u64) -> u64) -> Self {
        let Self { number, least, median, percentile_99, most } = self;
        let [least, median, percentile_99, most] = [least, median, percentile_99, most].map(change);
        Self { number, least, median, percentile_99, most }
    }
}

/// Result of a comparison.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Exact,
    Close(i128),
    Wrong(i128),
    Missing,
}

impl Verdict {
    fn of(found: Option<u64>, right: u64) -> Self {
        let Some(found) = found else { return Self::Missing };
        let off = i128::from(found) - i128::from(right);
        match off {
            0 => Self::Exact,
            _ if found.abs_diff(right) <= right / NOISE => Self::Close(off),
            _ => Self::Wrong(off),
        }
    }
}

impl Report {
    /// Creates a report on standard output.
    pub fn new(format: Format) -> Self {
        Self {
            facts: Vec::new(),
            counts: Vec::new(),
            measured: Vec::new(),
            numbers: Vec::new(),
            exact: 0,
            close: 0,
            wrong: 0,
            out: printer::out(),
            format,
            section: "",
        }
    }

    fn print(&mut self, line: &str) -> io::Result<()> {
        if self.format == Format::Text { writeln!(self.out, "{line}") } else { Ok(()) }
    }

    /// Adds a fact about the host or the guest.
    pub fn fact(&mut self, about: &'static str, fact: &str) -> io::Result<()> {
        self.facts.push(Fact { about, fact: fact.to_owned() });
        self.print(&format!("{about:6} {fact}"))
    }

    /// Begins a section.
    pub fn section(&mut self, title: &'static str) -> io::Result<()> {
        self.section = title;
        self.print(&format!("\n{title}"))
    }

    /// Compares a count with the right one.
    pub fn count(&mut self, what: &str, found: Option<u64>, right: u64) -> io::Result<()> {
        let verdict = Verdict::of(found, right);
        let (tally, said) = match &verdict {
            Verdict::Exact => (&mut self.exact, "exact".to_owned()),
            Verdict::Close(off) => (&mut self.close, format!("{off:+}")),
            Verdict::Wrong(off) => (&mut self.wrong, format!("WRONG by {off:+}")),
            Verdict::Missing => (&mut self.wrong, "MISSING".to_owned()),
        };
        *tally += 1;
        self.counts.push(Count { section: self.section, what: what.to_owned(), found, right });
        let found = found.map_or_else(|| "nothing".to_owned(), |found| found.to_string());
        self.print(&format!("  {what:44} {found:>10} of {right:<10} {said}"))
    }

    /// Adds what was measured, to which nothing is compared.
    pub fn measured(&mut self, what: &'static str, distribution: Option<Distribution>) -> io::Result<()> {
        self.measured.push(Measured { section: self.section, what, distribution });
        let said = match distribution {
            Some(Distribution { number, least, median, percentile_99, most }) => {
                format!("{least} to {most}, median {median}, 99 % at most {percentile_99} ({number} times)")
            }
            None => "it did not happen".to_owned(),
        };
        self.print(&format!("  {what:44} {said}"))
    }

    /// Adds a number, to which nothing is compared.
    pub fn number(&mut self, what: &str, number: u64) -> io::Result<()> {
        self.numbers.push(Number { section: self.section, what: what.to_owned(), found: number });
        self.print(&format!("  {what:44} {number:>10}"))
    }

    /// Ends the report, and returns the exit status.
    pub fn conclude(mut self) -> io::Result<ExitCode> {
        let Self { exact, close, wrong, .. } = self;
        if self.format == Format::Json {
            let text = serde_json::to_string_pretty(&self).map_err(io::Error::other)?;
            writeln!(self.out, "{text}")?;
        }
        self.print(&format!("\n{exact} exact, {close} close, {wrong} wrong"))?;
        if close > 0 {
            self.print("(close: some processors count an instruction that an interrupt breaks off)")?;
        }
        Ok(if wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_exact_close_or_wrong() {
        assert_eq!(Verdict::of(Some(100), 100), Verdict::Exact);
        assert_eq!(Verdict::of(Some(20_000_009), 20_000_004), Verdict::Close(5));
        assert_eq!(Verdict::of(Some(19_000_000), 20_000_000), Verdict::Wrong(-1_000_000));
        assert_eq!(Verdict::of(Some(101), 100), Verdict::Wrong(1), "few events have no noise");
        assert_eq!(Verdict::of(None, 100), Verdict::Missing);
    }

    #[test]
    fn a_distribution_is_read_from_five_numbers() {
        let found = Distribution::parse("1000 18 25 31 81").unwrap();
        assert_eq!((found.number, found.percentile_99), (1000, 31));
        assert_eq!(found.map(|value| value * 2).most, 162);
        for text in ["0", "", "1 2 3 4", "1 2 3 4 5 6", "1 2 x 4 5"] {
            assert_eq!(Distribution::parse(text), None, "{text}");
        }
    }
}
