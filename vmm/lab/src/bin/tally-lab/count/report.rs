//! Counts, how they are printed and stored, and what has grown since.

use std::ffi::OsString;
use std::io::Write;
use std::path::Path;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tally_lab::{Error, Result};

/// Version of the format.
const VERSION: u32 = 1;

/// What separates perf's fields. Names of events have commas.
pub const SEPARATOR: char = ';';

/// Where a program ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    /// On the simulated host.
    Host,
    Guest,
}

/// What was counted.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Report {
    version: u32,
    host: String,
    place: Place,
    /// The lab's parts: with others, the kernel executes something else.
    lab: String,
    command: Vec<String>,
    counts: Vec<Counted>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Counted {
    event: String,
    count: u64,
    #[serde(flatten)]
    compared: Option<Compared>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Compared {
    baseline: u64,
    grown: bool,
}

/// The report of an earlier run.
pub struct Baseline {
    report: Report,
    name: String,
}

/// Growth that is accepted, in millionths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Threshold(u32);

impl FromStr for Threshold {
    type Err = &'static str;

    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        let percent = text.strip_suffix('%').unwrap_or(text).trim().parse::<f64>().ok();
        let percent = percent.filter(|percent| (0.0..=1000.0).contains(percent));
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "it is within these bounds"
        )]
        percent
            .map(|percent| Self((percent * 10_000.0).round() as u32))
            .ok_or("a percentage from 0% to 1000%, such as 0.5%")
    }
}

impl Threshold {
    /// Growth by fewer than these is accepted by any threshold but 0: a small change moves a program's pages.
    const FEW: u64 = 100;

    fn accepts(self, count: u64, baseline: u64) -> bool {
        const WHOLE: u128 = 1_000_000;
        let is_small = self.0 > 0 && count.saturating_sub(baseline) < Self::FEW;
        is_small || u128::from(count) * WHOLE <= u128::from(baseline) * (WHOLE + u128::from(self.0))
    }
}

impl Baseline {
    /// Reads what a run has printed with `--json`.
    pub fn read(path: &Path) -> Result<Self> {
        let text = super::program::read(path)?;
        let name = path.display().to_string();
        let report: Report = serde_json::from_slice(&text).map_err(|error| {
            Error::Counts(format!("{name} is no output of `tally-lab count --json`: {error}"))
        })?;
        if report.version != VERSION {
            return Err(Error::Counts(format!("{name} has version {}, not {VERSION}", report.version)));
        }
        Ok(Self { report, name })
    }

    /// Returns the events to count for a comparison: the wanted ones, or all that the baseline has.
    pub fn events(&self, host: &str, place: Place, wanted: &[String]) -> Result<Vec<String>> {
        let Self { report, name } = self;
        if (&*report.host, report.place) != (host, place) {
            let place = if report.place == Place::Guest { "in a guest of" } else { "on" };
            return Err(Error::Counts(format!("{name} was counted {place} the host {}", report.host)));
        }
        if let Some(event) = wanted.iter().find(|event| self.count(event).is_none()) {
            return Err(Error::Counts(format!("{name} has no count of {event}")));
        }
        let all = report.counts.iter().map(|counted| counted.event.clone());
        Ok(if wanted.is_empty() { all.collect() } else { wanted.to_vec() })
    }

    fn count(&self, event: &str) -> Option<u64> {
        self.report.counts.iter().find(|counted| counted.event == event).map(|counted| counted.count)
    }
}

impl Report {
    /// Reads what `perf stat` has printed.
    pub fn new(host: &str, place: Place, lab: String, command: &[OsString], text: &str) -> Result<Self> {
        let command = command.iter().map(|word| word.to_string_lossy().into_owned()).collect();
        let counts =
            text.lines().filter(|line| line.contains(SEPARATOR)).map(counted).collect::<Result<_>>()?;
        Ok(Self { version: VERSION, host: host.to_owned(), place, lab, command, counts })
    }

    pub fn compare(&mut self, baseline: &Baseline, threshold: Threshold) -> Result<()> {
        if baseline.report.lab != self.lab {
            eprintln!(
                "tally-lab: {} was counted in another version of the lab, whose kernel executes something else",
                baseline.name
            );
        }
        for counted in &mut self.counts {
            let Some(before) = baseline.count(&counted.event) else {
                return Err(Error::Counts(format!("{} has no count of {}", baseline.name, counted.event)));
            };
            let grown = !threshold.accepts(counted.count, before);
            counted.compared = Some(Compared { baseline: before, grown });
        }
        Ok(())
    }

    /// Returns true if a count is larger than the baseline permits.
    pub fn has_grown(&self) -> bool {
        self.counts.iter().any(|counted| counted.compared.as_ref().is_some_and(|compared| compared.grown))
    }

    /// Prints the counts as JSON or as a table.
    pub fn print(&self, to: &mut dyn Write, as_json: bool) -> Result<()> {
        let text = if as_json {
            serde_json::to_string_pretty(self).expect("names and numbers can be written") + "\n"
        } else {
            self.table()
        };
        to.write_all(text.as_bytes()).map_err(|source| Error::System { action: "write the counts", source })
    }

    fn table(&self) -> String {
        let line = |Counted { event, count, compared }: &Counted| match compared {
            None => format!("{:>20}  {event}\n", number(*count)),
            Some(Compared { baseline, grown }) => format!(
                "{:>20}  {:>20}  {:>10}  {event}{}\n",
                number(*count),
                number(*baseline),
                change(*count, *baseline),
                if *grown { "  has grown" } else { "" }
            ),
        };
        let heading = match self.counts.first().and_then(|counted| counted.compared.as_ref()) {
            Some(_) => format!("{:>20}  {:>20}  {:>10}\n", "now", "baseline", "change"),
            None => String::new(),
        };
        heading + &self.counts.iter().map(line).collect::<String>()
    }
}

/// Reads a line of perf: count, unit, event, time, and the percentage of the time in which it was counted.
fn counted(line: &str) -> Result<Counted> {
    let fields: Vec<&str> = line.split(SEPARATOR).collect();
    let [count, _, event, _, share, ..] = fields[..] else {
        return Err(Error::Counts(format!("perf printed {line}")));
    };
    let refused = |why: &str| Err(Error::Counts(format!("{event} {why}")));
    match count.parse() {
        Ok(count) if share == "100.00" => Ok(Counted { event: event.to_owned(), count, compared: None }),
        Ok(_) => refused("was not counted all the time: there are fewer counters than events"),
        Err(_) if count == "<not supported>" => refused("is not an event of this processor"),
        Err(_) if count == "<not counted>" => {
            refused("was not counted: there are fewer counters than events")
        }
        Err(_) => refused("is not counted in whole numbers"),
    }
}

fn change(count: u64, baseline: u64) -> String {
    if count == baseline {
        return "none".to_owned();
    }
    if baseline == 0 {
        return "new".to_owned();
    }
    #[expect(clippy::cast_precision_loss, reason = "it is shown with two digits")]
    let percent = (count as f64 / baseline as f64 - 1.0) * 100.0;
    format!("{percent:+.2} %")
}

/// Renders a number with a separator between thousands.
fn number(number: u64) -> String {
    let digits = number.to_string();
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().filter_map(|group| std::str::from_utf8(group).ok()).collect();
    groups.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    const PERF: &str =
        "# started on Tue Nov 24\n\n20000004;;instructions:u;20197053;100.00;;\n12;;branches:u;1;100.00;;\n";

    fn report(text: &str) -> Result<Report> {
        Report::new("amd", Place::Host, "lab".to_owned(), &["./prog".into()], text)
    }

    fn baseline(report: &Report) -> Baseline {
        let text = serde_json::to_vec(report).unwrap();
        Baseline { report: serde_json::from_slice(&text).unwrap(), name: "before".to_owned() }
    }

    #[test]
    fn perfs_output_becomes_a_table() {
        assert_eq!(
            report(PERF).unwrap().table(),
            "          20,000,004  instructions:u\n                  12  branches:u\n"
        );
    }

    #[test]
    fn an_event_that_is_not_counted_all_the_time_is_an_error() {
        let error = |text| report(text).unwrap_err().to_string();
        assert_eq!(
            error("<not supported>;;cache-misses:u;0;100.00;;"),
            "cache-misses:u is not an event of this processor"
        );
        assert!(error("12;;cycles:u;500;50.00;;").contains("fewer counters"));
        assert!(error("<not counted>;;cycles:u;0;0.00;;").contains("fewer counters"));
        assert!(error("1.25;msec;task-clock;1;100.00;;").contains("whole numbers"));
        let raw = report("7;;cpu/event=0xc0,umask=0x0/u;500;100.00;;").unwrap();
        assert_eq!(raw.counts[0].event, "cpu/event=0xc0,umask=0x0/u");
    }

    #[test]
    fn growth_beyond_the_threshold_is_told() {
        let before = baseline(&report(PERF).unwrap());
        let more = PERF.replace("20000004", "20100004");
        for (threshold, grown) in [("0.5%", false), ("0.4", true), ("0", true)] {
            let mut now = report(&more).unwrap();
            now.compare(&before, threshold.parse().unwrap()).unwrap();
            assert_eq!(now.has_grown(), grown, "{threshold}");
            assert_eq!(now.table().contains("+0.50 %  instructions:u  has grown"), grown, "{}", now.table());
        }
        // A report with a comparison is a baseline, too.
        let mut same = report(PERF).unwrap();
        same.compare(&before, Threshold(0)).unwrap();
        assert!(!same.has_grown());
        same.compare(&baseline(&same), Threshold(0)).unwrap();
        assert!(report("1;;other;1;100.00;;").unwrap().compare(&before, Threshold(0)).is_err());
    }

    #[test]
    fn few_more_events_are_growth_only_if_none_is_accepted() {
        assert!(Threshold(5_000).accepts(99, 0) && !Threshold(5_000).accepts(100, 0));
        assert!(Threshold(0).accepts(7, 7) && !Threshold(0).accepts(8, 7));
        assert_eq!((change(3, 0), change(3, 3)), ("new".to_owned(), "none".to_owned()));
    }

    #[test]
    fn a_baseline_must_have_what_is_compared() {
        let before = baseline(&report(PERF).unwrap());
        assert_eq!(before.events("amd", Place::Host, &[]).unwrap(), ["instructions:u", "branches:u"]);
        assert_eq!(before.events("amd", Place::Host, &["branches:u".to_owned()]).unwrap(), ["branches:u"]);
        let error =
            |host, place, wanted: &[String]| before.events(host, place, wanted).unwrap_err().to_string();
        assert_eq!(error("intel", Place::Host, &[]), "before was counted on the host amd");
        assert_eq!(error("amd", Place::Guest, &[]), "before was counted on the host amd");
        assert_eq!(error("amd", Place::Host, &["cycles:u".to_owned()]), "before has no count of cycles:u");
    }

    #[test]
    fn thresholds_are_percentages() {
        assert_eq!("0.5%".parse(), Ok(Threshold(5_000)));
        assert_eq!("12".parse(), Ok(Threshold(120_000)));
        for text in ["", "%", "-1%", "nan", "half", "1001%"] {
            assert!(text.parse::<Threshold>().is_err(), "{text}");
        }
    }
}
