//! The report: counts beside the right ones.

use std::io::{self, Write};
use std::process::ExitCode;

use crate::host::printer::{self, Printer};

/// A count may be off by one in this many: many processors count an instruction that an interrupt breaks off, and the
/// guest does not choose when the host is interrupted.
const NOISE: u64 = 20_000;

/// A report, which is printed line by line.
pub struct Report {
    out: Printer,
    exact: usize,
    close: usize,
    wrong: usize,
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
    pub fn new() -> Self {
        Self { out: printer::out(), exact: 0, close: 0, wrong: 0 }
    }

    /// Prints a fact about the host or the guest.
    pub fn fact(&mut self, about: &str, fact: &str) -> io::Result<()> {
        writeln!(self.out, "{about:6} {fact}")
    }

    /// Prints the title of a section.
    pub fn title(&mut self, title: &str) -> io::Result<()> {
        writeln!(self.out, "\n{title}")
    }

    /// Compares a count with the right one and prints the result.
    pub fn count(&mut self, what: &str, found: Option<u64>, right: u64) -> io::Result<()> {
        let verdict = Verdict::of(found, right);
        let (tally, said) = match &verdict {
            Verdict::Exact => (&mut self.exact, "exact".to_owned()),
            Verdict::Close(off) => (&mut self.close, format!("{off:+}")),
            Verdict::Wrong(off) => (&mut self.wrong, format!("WRONG by {off:+}")),
            Verdict::Missing => (&mut self.wrong, "MISSING".to_owned()),
        };
        *tally += 1;
        let found = found.map_or_else(|| "nothing".to_owned(), |found| found.to_string());
        writeln!(self.out, "  {what:44} {found:>10} of {right:<10} {said}")
    }

    /// Prints what was measured, to which nothing is compared.
    pub fn measured(&mut self, what: &str, found: &str) -> io::Result<()> {
        writeln!(self.out, "  {what:44} {found}")
    }

    /// Prints the sums and returns the exit status.
    pub fn conclude(mut self) -> io::Result<ExitCode> {
        let Self { exact, close, wrong, .. } = self;
        writeln!(self.out, "\n{exact} exact, {close} close, {wrong} wrong")?;
        if close > 0 {
            writeln!(self.out, "(close: some processors count an instruction that an interrupt breaks off)")?;
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
}
