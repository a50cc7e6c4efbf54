//! Sums up an event log. Somebody else may have written it, so its numbers may be any: sums of them stop at the
//! largest.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::words::{Seconds, counters};
use crate::protocol::record::{Location, Record, What};

/// Maximum number of places that are shown.
const PLACES: usize = 10;

/// Sums of a log's records.
#[derive(Debug, Default)]
pub struct Summary {
    records: u64,
    /// Records of older files that are not there, or could not be read.
    gone: u64,
    lost: u64,
    notes: u64,
    /// Time of the last record.
    last: Duration,
    is_over: bool,
    /// Interrupts by vCPU.
    interrupts: BTreeMap<u8, u64>,
    /// Counters by vCPU and number.
    counters: BTreeMap<(u8, u8), Counter>,
    /// Numbers of overflows by RIP.
    places: BTreeMap<u64, u64>,
}

#[derive(Debug, Default)]
struct Counter {
    configurations: u64,
    overflows: u64,
    /// Times of the first and the last overflow.
    between: Option<(Duration, Duration)>,
    starvations: u64,
    missed: Duration,
    /// Start of the starvation that has not ended.
    starved: Option<Duration>,
}

impl Summary {
    /// Adds a record to the sums.
    pub fn add(&mut self, record: &Record<String>) {
        self.last = record.time;
        if let What::Continued { before, .. } = record.what {
            self.gone = before.saturating_sub(self.records);
            return;
        }
        self.records += 1;
        match &record.what {
            What::Message(_) | What::Continued { .. } => {}
            What::Note(_) => self.notes += 1,
            What::Lost(records) => self.lost = self.lost.saturating_add(*records),
            What::End(_) => self.is_over = true,
            What::Configured { counter, .. } => self.counter(record.location, *counter).configurations += 1,
            What::Unconfigured { counter } => drop(self.counter(record.location, *counter)),
            What::Overflowed { counters: set, interrupts } => {
                for counter in counters(*set) {
                    self.counter(record.location, counter).overflowed(record.time);
                }
                if let Some(rip) = record.location.rip {
                    *self.places.entry(rip).or_default() += 1;
                }
                if *interrupts {
                    *self.interrupts.entry(vcpu(record.location)).or_default() += 1;
                }
            }
            What::Starved { counter, .. } => {
                let counter = self.counter(record.location, *counter);
                counter.starvations += 1;
                counter.starved = Some(record.time);
            }
            What::Recovered { counter, missed, .. } | What::GivenUp { counter, missed, .. } => {
                let counter = self.counter(record.location, *counter);
                counter.missed = counter.missed.saturating_add(*missed);
                counter.starved = None;
            }
        }
    }

    fn counter(&mut self, location: Location, counter: u8) -> &mut Counter {
        self.counters.entry((vcpu(location), counter)).or_default()
    }
}

/// Returns the vCPU of a counter's record. A record without one counts for vCPU 0.
fn vcpu(location: Location) -> u8 {
    location.vcpu.unwrap_or_default()
}

impl Counter {
    fn overflowed(&mut self, time: Duration) {
        self.overflows += 1;
        let (first, _) = *self.between.get_or_insert((time, time));
        self.between = Some((first, time));
    }

    /// Returns the overflows per second, from the first to the last.
    fn rate(&self) -> Option<f64> {
        let (first, last) = self.between?;
        let seconds = last.checked_sub(first).filter(|time| !time.is_zero())?.as_secs_f64();
        #[expect(clippy::cast_precision_loss, reason = "it is shown with a few digits")]
        let overflows = (self.overflows - 1) as f64;
        Some(overflows / seconds)
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let many = |number: u64| if number == 1 { "" } else { "s" };
        let Self { records, gone, lost, notes, .. } = self;
        let (records_s, notes_s) = (many(*records), many(*notes));
        let end =
            if self.is_over { "the machine has ended" } else { "no end: the machine runs, or was killed" };
        let gone = match gone {
            0 => String::new(),
            gone => format!(", {gone} gone with older files"),
        };
        writeln!(
            f,
            "summary: {records} record{records_s} in {} s, {notes} note{notes_s}, {lost} lost{gone}; {end}",
            Seconds(self.last)
        )?;
        if !self.counters.is_empty() {
            writeln!(
                f,
                "{:>4} {:>7} {:>14} {:>10} {:>12} {:>11} {:>15}",
                "vCPU",
                "counter",
                "configurations",
                "overflows",
                "per second",
                "starvations",
                "missed seconds"
            )?;
        }
        for ((vcpu, number), counter) in &self.counters {
            let rate = counter.rate().map_or_else(|| "-".to_owned(), |rate| format!("{rate:.1}"));
            let since = counter.starved.map_or(Duration::ZERO, |since| self.last.saturating_sub(since));
            writeln!(
                f,
                "{vcpu:>4} {number:>7} {:>14} {:>10} {rate:>12} {:>11} {:>15}",
                counter.configurations,
                counter.overflows,
                counter.starvations,
                Seconds(counter.missed.saturating_add(since)).to_string()
            )?;
        }
        for (vcpu, interrupts) in &self.interrupts {
            writeln!(f, "vCPU {vcpu}: {interrupts} interrupt{}", many(*interrupts))?;
        }
        let mut places: Vec<_> = self.places.iter().collect();
        places.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
        for (rip, count) in places.into_iter().take(PLACES) {
            writeln!(f, "{count} overflow{} at {rip:#x}", many(*count))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::record::testing::any_record;
    use proptest::prelude::*;

    fn summary(records: &[(u64, Option<u64>, What<&str>)]) -> String {
        let mut summary = Summary::default();
        for (ms, rip, what) in records {
            let mut bytes = Vec::new();
            let location = Location { vcpu: Some(1), rip: *rip };
            what.encode(Duration::from_millis(*ms), location, &mut bytes);
            summary.add(&Record::decode(&bytes[2..]).unwrap());
        }
        summary.to_string()
    }

    #[test]
    fn a_summary_adds_up_what_happened_to_each_counter() {
        let overflow = |counters| What::Overflowed { counters, interrupts: counters & 1 != 0 };
        let text = summary(&[
            (0, None, What::Configured { counter: 0, interrupts: true, event: "rc0:u" }),
            (1000, Some(7), overflow(0b11)),
            (1100, Some(8), overflow(1)),
            (1200, Some(8), overflow(1)),
            (1300, None, What::Lost(5)),
            (1400, None, What::Starved { counter: 0, event: "rc0:u" }),
            (1500, None, What::Recovered { counter: 0, missed: Duration::from_millis(150), event: "rc0:u" }),
            (1600, None, What::Starved { counter: 0, event: "rc0:u" }),
            (1650, None, What::End("over")),
        ]);
        let lines: Vec<Vec<_>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(
            text.lines().next().unwrap(),
            "summary: 9 records in 1.650000000 s, 0 notes, 5 lost; the machine has ended"
        );
        assert_eq!(lines[2], ["1", "0", "1", "3", "10.0", "2", "0.200000000"], "what is still missed counts");
        assert_eq!(lines[3], ["1", "1", "0", "1", "-", "0", "0.000000000"]);
        let rest: Vec<_> = text.lines().skip(4).collect();
        assert_eq!(rest, ["vCPU 1: 3 interrupts", "2 overflows at 0x8", "1 overflow at 0x7"]);
    }

    #[test]
    fn records_of_files_that_are_gone_are_counted() {
        let continued = |file, before| (0, None, What::Continued { file, before });
        let note = || (0, None, What::Note("x"));
        let first = |records: &[_]| summary(records).lines().next().unwrap().to_owned();
        let whole = first(&[note(), continued(2, 1), note()]);
        assert!(whole.starts_with("summary: 2 records in 0.000000000 s, 2 notes, 0 lost; "), "{whole}");
        let gone = first(&[continued(7, 40), note(), continued(8, 41), note()]);
        assert!(gone.contains(" 2 notes, 0 lost, 40 gone with older files; "), "{gone}");
        let damaged = first(&[continued(7, 40), note(), continued(8, 50), note()]);
        assert!(damaged.contains(", 49 gone with older files; "), "{damaged}");
    }

    #[test]
    fn sums_of_numbers_that_nobody_has_counted_stop_at_the_largest() {
        let missed = Duration::from_nanos(u64::MAX);
        let text = summary(&[
            (0, None, What::Lost(u64::MAX)),
            (0, None, What::Lost(u64::MAX)),
            (0, None, What::Recovered { counter: 0, missed, event: "x" }),
            (0, None, What::GivenUp { counter: 0, missed, event: "x" }),
            (0, None, What::Continued { file: u64::MAX, before: u64::MAX }),
        ]);
        assert!(
            text.contains(" 18446744073709551615 lost, 18446744073709551611 gone with older files;"),
            "{text}"
        );
        assert!(text.contains(" 36893488147.419103230\n"), "{text}");
    }

    proptest! {
        #[test]
        fn any_records_can_be_summed_up(records in proptest::collection::vec(any_record(), 0..50)) {
            let mut summary = Summary::default();
            for record in &records {
                summary.add(record);
            }
            prop_assert!(summary.to_string().starts_with("summary: "));
        }
    }

    #[test]
    fn only_the_busiest_places_are_named() {
        let records: Vec<_> = (0..99)
            .map(|rip| (rip, Some(rip.max(89)), What::Overflowed { counters: 1, interrupts: false }))
            .collect();
        let text = summary(&records);
        let places: Vec<_> = text.lines().filter(|line| line.contains(" at 0x")).collect();
        assert_eq!((places.len(), places[0]), (10, "90 overflows at 0x59"));
    }
}
