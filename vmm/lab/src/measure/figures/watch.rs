//! The cost of monitoring for a guest: the same sampling in the guest, with and without monitoring by its operator.
//!
//! The cost is the time between two samples by the guest's own clock. On a simulated host with one CPU, this time
//! includes all work for a sample, in the guest and on the host, and a nanosecond is an instruction. [`attention`]
//! measures the cost of monitoring that does not depend on samples, [`outside`] that of sampling a guest from outside.

pub mod attention;
pub mod outside;

use std::fmt::Write;
use std::path::Path;

use guest_images::{Progress, Suite};

use crate::error::Result;
use crate::scenario::Scenario;
use crate::scenario::programs::{LOOP, LOOP_INSTRUCTIONS};

/// Sampling period in instructions.
pub const PERIOD: u64 = 100_000;

/// A way to monitor a guest.
struct Case {
    name: &'static str,
    options: &'static str,
}

/// The others are compared with the first one.
const CASES: [Case; 2] =
    [Case { name: "no monitoring", options: "" }, Case { name: "`--pmu-log`", options: "--pmu-log log" }];

/// Time of a guest's sampling with one way of monitoring.
#[derive(Debug)]
pub struct Figure {
    pub pmu: &'static str,
    pub case: &'static str,
    /// The time from the first sample to the last, in nanoseconds of the guest's clock.
    pub nanoseconds: u64,
    /// Number of samples after the first.
    pub samples: u64,
}

impl Figure {
    /// Returns the time from one sample to the next in nanoseconds, which includes the sampled program's own time.
    pub fn per_sample(&self) -> u64 {
        self.nanoseconds / self.samples
    }

    /// Returns how many more instructions a sample takes than in the other case.
    pub fn more_than(&self, other: &Self) -> u64 {
        self.per_sample().saturating_sub(other.per_sample())
    }
}

/// Measures the PMUs with these names. Each PMU's first figure is that without monitoring.
pub fn measure(pmus: &[&'static str], tally: &Path, progress: &mut Progress) -> Result<Vec<Vec<Figure>>> {
    let scenario = Scenario::with_all_counters(script(pmus)).file(tally, "tally").guest_with(
        Suite::default(),
        &[("loop", LOOP)],
        progress,
    )?;
    let text = super::output::run(&scenario, progress)?;
    let mut lines = text.lines();
    let mut figure = |pmu, case: &Case| {
        let (nanoseconds, samples) = lines.next()?.split_once(' ')?;
        let (nanoseconds, samples) = (nanoseconds.parse().ok()?, samples.parse().ok()?);
        (samples + 1 == LOOP_INSTRUCTIONS / PERIOD).then_some(Figure {
            pmu,
            case: case.name,
            nanoseconds,
            samples,
        })
    };
    let of_pmu = |pmu: &&'static str| CASES.iter().map(|case| figure(*pmu, case)).collect();
    let figures: Option<_> = pmus.iter().map(of_pmu).collect();
    figures.ok_or_else(|| super::output::unreadable(&text))
}

/// Returns the script, which prints `NANOSECONDS SAMPLES` for each PMU and each case.
fn script(pmus: &[&str]) -> String {
    // The limit on the time of samples is turned off. `tr` leaves the digits of the times.
    let sample = format!(
        "echo 0 >/proc/sys/kernel/perf_cpu_time_max_percent
perf record -q -N -o data -c {PERIOD} -e instructions:u ./loop
perf script -i data --ns -F time | tr -dc \"0-9\\n\" >times
echo $(($(tail -n 1 times) - $(head -n 1 times))) $(($(wc -l <times) - 1))"
    );
    let mut script = String::new();
    for pmu in pmus {
        for Case { options, .. } in CASES {
            let run = format!("./tally run --pmu {pmu} {options} -- sh -c '{sample}'");
            writeln!(script, "{run} || exit").expect("writing to a string cannot fail");
        }
    }
    script
}

pub fn table(figures: &[Vec<Figure>]) -> String {
    let mut table =
        String::from("| monitoring | `--pmu` | instructions per overflow | at 10,000 overflows a second |\n");
    table += "|---|---|---:|---:|\n";
    for of_pmu in figures {
        let [base, watched @ ..] = &**of_pmu else { continue };
        for figure in watched {
            let more = figure.more_than(base);
            // At 10,000 overflows a second, there are 100,000 ns from one to the next.
            let (percent, rest) = (more / 1000, more % 1000 / 10);
            writeln!(table, "| {} | `{}` | {more} | {percent}.{rest:02} % |", figure.case, figure.pmu)
                .expect("writing to a string cannot fail");
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_the_cost_of_monitoring() {
        let figure = |case, nanoseconds| Figure { pmu: "amd", case, nanoseconds, samples: 2 };
        let table = table(&[vec![figure("no monitoring", 200_000), figure("`--pmu-log`", 203_000)]]);
        assert_eq!(table.lines().last(), Some("| `--pmu-log` | `amd` | 1500 | 1.50 % |"));
    }
}
