//! What it costs a guest to be watched: the same sampling in it, with and without what its operator looks on with.
//!
//! The guest's own clock says how far its samples are apart. On a simulated host with one processor everything that is done
//! for a sample, by whomever, is in that time, and a nanosecond is an instruction.
//! What does not come with samples is measured otherwise: [`attention`].

pub mod attention;

use std::fmt::Write;
use std::path::Path;

use guest_images::{Progress, Suite};

use crate::programs::{LOOP, LOOP_INSTRUCTIONS};
use crate::{Error, Result, Scenario};

/// The sampled program's instructions from one overflow to the next.
pub const PERIOD: u64 = 100_000;

/// A way to watch a guest.
struct Case {
    name: &'static str,
    /// Options of `tally run` for it.
    options: &'static str,
}

/// The first is what the others are compared with.
const CASES: [Case; 2] =
    [Case { name: "nobody looks", options: "" }, Case { name: "`--pmu-log`", options: "--pmu-log log" }];

/// What a guest's sampling takes while it is watched in one way.
#[derive(Debug)]
pub struct Figure {
    /// The PMU that it sees.
    pub pmu: &'static str,
    /// How it is watched.
    pub case: &'static str,
    /// The time from the first sample to the last, in nanoseconds of the guest's clock.
    pub nanoseconds: u64,
    /// How many samples there were after the first.
    pub samples: u64,
}

impl Figure {
    /// Nanoseconds from one sample to the next, the sampled program's own included.
    pub fn per_sample(&self) -> u64 {
        self.nanoseconds / self.samples
    }

    /// How many instructions more than with nobody looking a sample takes.
    pub fn more_than(&self, other: &Self) -> u64 {
        self.per_sample().saturating_sub(other.per_sample())
    }
}

/// Measures PMUs by their names; the figures of each begin with that of the guest that nobody watches.
pub fn measure(pmus: &[&'static str], tally: &Path, progress: &mut Progress) -> Result<Vec<Vec<Figure>>> {
    let outcome = Scenario::new(script(pmus))
        .file(tally, "tally")
        .guest_with(Suite::default(), &[("loop", LOOP)], progress)?
        .run(progress)?;
    let text = outcome.text();
    if outcome.status != 0 {
        return Err(Error::Command(String::from_utf8_lossy(&outcome.stderr).trim().to_owned()));
    }
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
    figures.ok_or_else(|| Error::Command(format!("the measuring script printed\n{text}")))
}

/// Prints `NANOSECONDS SAMPLES` for each PMU and each case.
fn script(pmus: &[&str]) -> String {
    // The guest's kernel may slow itself down for what samples cost it. The digits of the times are all that is wanted.
    let sample = format!(
        "echo 0 >/proc/sys/kernel/perf_cpu_time_max_percent
perf record -q -N -o data -c {PERIOD} -e instructions:u ./loop
perf script -i data --ns -F time | tr -dc \"0-9\\n\" >times
echo $(($(tail -n 1 times) - $(head -n 1 times))) $(($(wc -l <times) - 1))"
    );
    let mut script = String::new();
    for pmu in pmus {
        for Case { options, .. } in CASES {
            let run =
                format!("./tally run --append cryptomgr.notests --pmu {pmu} {options} -- sh -c '{sample}'");
            writeln!(script, "{run} || exit").expect("writing to a string cannot fail");
        }
    }
    script
}

/// The figures as a table.
pub fn table(figures: &[Vec<Figure>]) -> String {
    let mut table =
        String::from("| watched by | `--pmu` | instructions for an overflow | at 10,000 a second |\n");
    table += "|---|---|---:|---:|\n";
    for of_pmu in figures {
        let [base, watched @ ..] = &**of_pmu else { continue };
        for figure in watched {
            let more = figure.more_than(base);
            // So many nanoseconds of the 100,000 from one to the next.
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
    fn a_table_says_what_being_watched_costs() {
        let figure = |case, nanoseconds| Figure { pmu: "amd", case, nanoseconds, samples: 2 };
        let table = table(&[vec![figure("nobody looks", 200_000), figure("`--pmu-log`", 203_000)]]);
        assert_eq!(table.lines().last(), Some("| `--pmu-log` | `amd` | 1500 | 1.50 % |"));
    }
}
