//! `tally log --show FILE`: prints an event log as text.

use std::fmt;
use std::io::{self, BufWriter, Read, Write};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};

use super::files::{Files, LogPart};
use super::read::Reader;
use super::summary::Summary;
use super::words::{Seconds, counters};
use crate::host::printer;
use crate::protocol::record::{Header, Record, What};

/// Parts of a log to print.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// A line for each record, and the summary.
    All,
    /// The summary alone.
    Summary,
}

/// Prints a log.
pub fn show(path: &Path, part: Part) -> Result<()> {
    let Files { header, parts, missing } = Files::open(path)?;
    if let Some(missing) = missing {
        printer::say(&missing);
    }
    let mut out = BufWriter::new(printer::out());
    let damage = match print(header, parts, part, &mut out) {
        // A reader that closes the pipe has read enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Vec::new(),
        result => result.context("cannot print the log")?,
    };
    if damage.is_empty() { Ok(()) } else { Err(anyhow!(damage.join("; "))) }
}

/// Prints a log with this content. Returns what ended its reading early.
pub fn show_bytes(bytes: &[u8], part: Part, out: &mut impl Write) -> io::Result<Option<String>> {
    match Reader::new(bytes) {
        Ok((header, records)) => {
            let whole = LogPart { path: "log".into(), records: records.peekable() };
            let damage = print(header, vec![whole], part, out)?;
            Ok((!damage.is_empty()).then(|| damage.join("; ")))
        }
        Err(error) => Ok(Some(error.to_string())),
    }
}

/// Prints all that can be read. Returns what ended the reading of a file early, with the file's name.
fn print<R: Read>(
    header: Header,
    parts: Vec<LogPart<R>>,
    part: Part,
    out: &mut impl Write,
) -> io::Result<Vec<String>> {
    writeln!(out, "{header}")?;
    let (mut summary, mut damage) = (Summary::default(), Vec::new());
    for LogPart { path, records } in parts {
        for record in records {
            match record {
                Ok(record) => {
                    summary.add(&record);
                    if part == Part::All {
                        writeln!(out, "{record}")?;
                    }
                }
                Err(error) => damage.push(format!("{}: {:#}", path.display(), anyhow!(error))),
            }
        }
    }
    write!(out, "{summary}")?;
    out.flush()?;
    Ok(damage)
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (wall, monotonic) = (Date(self.wall), Seconds(self.monotonic));
        write!(f, "began {wall}, CLOCK_MONOTONIC {monotonic}; times are seconds since then")
    }
}

impl fmt::Display for Record<String> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>14} ", Seconds(self.time).to_string())?;
        match (self.location.vcpu, self.location.rip) {
            (Some(vcpu), Some(rip)) => write!(f, "vCPU {vcpu} at {rip:#x}: ")?,
            (Some(vcpu), None) => write!(f, "vCPU {vcpu}: ")?,
            (None, _) => {}
        }
        write!(f, "{}", self.what)
    }
}

impl fmt::Display for What<String> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Message(words) => write!(f, "{}", Line(words)),
            Self::Note(words) => write!(f, "note: {}", Line(words)),
            Self::Lost(1) => write!(f, "1 record is lost here: it could not be written"),
            Self::Lost(records) => write!(f, "{records} records are lost here: they could not be written"),
            Self::End(how) => write!(f, "end: {}", Line(how)),
            Self::Continued { file, before } => {
                let records = if *before == 1 { "record" } else { "records" };
                write!(f, "the log's file number {file} begins, after {before} {records}")
            }
            Self::Configured { counter, interrupts, event } => {
                let then = if *interrupts { ", and interrupts" } else { "" };
                write!(f, "counter {counter} counts {}{then}", Line(event))
            }
            Self::Unconfigured { counter } => write!(f, "counter {counter} counts nothing"),
            Self::Overflowed { counters, interrupts } => {
                let then = if *interrupts { ", and the guest is interrupted" } else { "" };
                write!(f, "{}{then}", Overflow(*counters))
            }
            Self::Starved { counter, event } => write!(f, "counter {counter} ({}) is starved", Line(event)),
            Self::Recovered { counter, missed, event } => {
                let missed = Seconds(*missed);
                write!(f, "counter {counter} ({}) counts again, after up to {missed} s", Line(event))
            }
            Self::GivenUp { counter, missed, event } => {
                let missed = Seconds(*missed);
                write!(
                    f,
                    "counter {counter} ({}) is no longer used, after up to {missed} s without hardware",
                    Line(event)
                )
            }
        }
    }
}

/// Overflows of these counters (a mask).
struct Overflow(u64);

impl fmt::Display for Overflow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counters: Vec<_> = counters(self.0).map(|counter| counter.to_string()).collect();
        match &*counters {
            [counter] => write!(f, "counter {counter} overflows"),
            counters => write!(f, "counters {} overflow", counters.join(", ")),
        }
    }
}

/// Text without control characters, for a terminal: somebody else may have written the file.
struct Line<'a>(&'a str);

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plain = |c: char| if c.is_control() { ' ' } else { c };
        self.0.chars().try_for_each(|c| write!(f, "{}", plain(c)))
    }
}

/// A date and time, from the time since 1970.
struct Date(Duration);

impl fmt::Display for Date {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        let (year, month, day) = date(seconds / 86_400);
        let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
        let nanos = self.0.subsec_nanos();
        write!(f, "{year}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}.{nanos:09} UTC")
    }
}

/// Returns year, month and day of a day, given as days since 1970. Years are counted from March here, so that a leap
/// day is a year's last, within the 400 years after which the calendar repeats.
fn date(days: u64) -> (u64, u64, u64) {
    const TO_MARCH_OF_YEAR_0: u64 = 719_468;
    const FOUR_CENTURIES: u64 = 146_097;
    let days = days + TO_MARCH_OF_YEAR_0;
    let (era, day) = (days / FOUR_CENTURIES, days % FOUR_CENTURIES);
    let year = (day - day / 1460 + day / 36_524 - day / (FOUR_CENTURIES - 1)) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (year, month) = (era * 400 + year, month + 3);
    if month > 12 { (year + 1, month - 12, day) } else { (year, month, day) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::record::Location;
    use crate::protocol::record::testing::any_record;
    use proptest::prelude::*;
    use std::fs;

    fn line(vcpu: Option<u8>, rip: Option<u64>, what: What<String>) -> String {
        Record { time: Duration::from_millis(1500), location: Location { vcpu, rip }, what }.to_string()
    }

    #[test]
    fn a_line_says_when_where_and_what() {
        let event = || "rc0:u".to_owned();
        assert_eq!(
            line(Some(1), Some(0x40_1007), What::Configured { counter: 2, interrupts: true, event: event() }),
            "   1.500000000 vCPU 1 at 0x401007: counter 2 counts rc0:u, and interrupts"
        );
        assert_eq!(
            line(Some(0), Some(7), What::Overflowed { counters: 0b101, interrupts: false }),
            "   1.500000000 vCPU 0 at 0x7: counters 0, 2 overflow"
        );
        assert_eq!(line(None, None, What::Note("now".to_owned())), "   1.500000000 note: now");
        let missed = Duration::from_millis(20);
        assert_eq!(
            line(Some(1), Some(7), What::Overflowed { counters: 1, interrupts: true }),
            "   1.500000000 vCPU 1 at 0x7: counter 0 overflows, and the guest is interrupted"
        );
        assert_eq!(
            line(Some(0), None, What::Recovered { counter: 0, missed, event: event() }),
            "   1.500000000 vCPU 0: counter 0 (rc0:u) counts again, after up to 0.020000000 s"
        );
    }

    #[test]
    fn words_do_nothing_to_a_terminal() {
        let what = What::Note("one\ntwo\x1b[31m".to_owned());
        assert_eq!(what.to_string(), "note: one two [31m");
    }

    #[test]
    fn a_date_is_the_calendars() {
        let shown = |seconds| Date(Duration::from_secs(seconds)).to_string();
        assert_eq!(shown(0), "1970-01-01 00:00:00.000000000 UTC");
        assert_eq!(shown(951_782_400), "2000-02-29 00:00:00.000000000 UTC");
        assert_eq!(shown(951_868_799), "2000-02-29 23:59:59.000000000 UTC");
        assert_eq!(shown(951_868_800), "2000-03-01 00:00:00.000000000 UTC");
        assert_eq!(shown(1_735_689_599), "2024-12-31 23:59:59.000000000 UTC");
        assert_eq!(shown(4_107_542_400), "2100-03-01 00:00:00.000000000 UTC");
    }

    proptest! {
        #[test]
        fn any_file_can_be_shown(
            times in any::<[u64; 2]>(),
            records in proptest::collection::vec(any_record(), 0..20),
            older in proptest::collection::vec(any_record(), 0..20),
            rest in any::<Vec<u8>>(),
        ) {
            let [wall, monotonic] = times.map(Duration::from_nanos);
            let header = Header { wall, monotonic };
            let bytes = |begin: Option<u64>, records: Vec<Record<String>>| {
                let mut bytes = header.encode();
                if let Some(file) = begin {
                    What::<&str>::Continued { file, before: 7 }.encode(Duration::ZERO, Location::default(), &mut bytes);
                }
                for Record { time, location, what } in records {
                    what.encode(time, location, &mut bytes);
                }
                bytes.extend(&rest);
                bytes
            };
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("log");
            fs::write(&path, bytes(Some(u64::MAX), records)).unwrap();
            fs::write(path.with_extension("1"), bytes(Some(u64::MAX - 1), older)).unwrap();
            let Files { header, parts, .. } = Files::open(&path).unwrap();
            prop_assert_eq!(parts.len(), 2);
            let mut out = Vec::new();
            print(header, parts, Part::All, &mut out).unwrap();
            prop_assert!(String::from_utf8(out).unwrap().contains("\nsummary: "));
            // Without a header, it is no log.
            fs::write(&path, &rest).unwrap();
            prop_assert!(Files::open(&path).is_err());
        }
    }

    #[test]
    fn a_log_that_is_cut_is_shown_up_to_there_and_summed_up() {
        let header = Header { wall: Duration::ZERO, monotonic: Duration::from_secs(3) };
        let mut bytes = header.encode();
        for number in 1..=2 {
            What::Note(number).encode(Duration::from_secs(number), Location::default(), &mut bytes);
        }
        bytes.pop();
        let shown = |part| {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("log");
            fs::write(&path, &bytes).unwrap();
            let Files { header, parts, missing } = Files::open(&path).unwrap();
            assert_eq!(missing, None);
            let mut out = Vec::new();
            let damage = print(header, parts, part, &mut out).unwrap();
            assert_eq!(damage.len(), 1);
            let begins = format!("{}: the log breaks off in the record at byte ", path.display());
            assert!(damage[0].starts_with(&begins), "{damage:?}");
            String::from_utf8(out).unwrap()
        };
        let all = shown(Part::All);
        let lines: Vec<_> = all.lines().collect();
        assert!(
            lines[0].contains("1970-01-01 00:00:00.000000000 UTC, CLOCK_MONOTONIC 3.000000000;"),
            "{all}"
        );
        assert_eq!(lines[1], "   1.000000000 note: 1");
        assert!(lines[2].starts_with("summary: 1 record "), "{all}");
        assert!(!shown(Part::Summary).contains("note: 1"));
    }
}
