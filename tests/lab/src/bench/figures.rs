//! What was printed, as numbers, and what follows from them.

use std::collections::BTreeMap;

use super::plan::{Column, Measure, Row, Workload};
use super::script::{Limit, Plan, Section};
use super::{BEGIN, END, READ_EVERY};
use crate::{Error, Result};

/// The names and numbers that were printed for one run of a row.
type Run = BTreeMap<String, u64>;

/// What the host did while the workload ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Exits from the guest, whoever handled them.
    pub exits: u64,
    /// Of these those to user space.
    pub user_exits: u64,
    /// System calls of the vCPU's thread, `KVM_RUN` included.
    pub calls: u64,
}

/// Where a number is from.
type Key = (Limit, Column, Row);

/// All that was measured.
#[derive(Debug, Default)]
pub struct Figures {
    runs: BTreeMap<Key, Vec<Run>>,
    counts: BTreeMap<Key, Counts>,
}

/// A number that was measured several times.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    /// The one in the middle.
    pub median: f64,
    /// From the smallest to the largest.
    pub range: f64,
}

impl Spread {
    fn of(mut numbers: Vec<f64>) -> Option<Self> {
        numbers.sort_unstable_by(f64::total_cmp);
        let (least, most) = (numbers.first()?, numbers.last()?);
        Some(Self { median: numbers[numbers.len() / 2], range: most - least })
    }
}

/// Samples that were taken, and how many of them there should be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Samples {
    /// Those in perf's file.
    pub taken: f64,
    /// As many as the counts make.
    pub implied: f64,
    /// How many events were counted at a time: so many samples are taken at once.
    pub at_once: f64,
}

/// What one of something cost: a sampling point, a switch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// Of what.
    pub of: &'static str,
    /// Nanoseconds, which in the lab are instructions.
    pub nanoseconds: f64,
    /// What the host did for it, if that was counted.
    pub counts: Option<[f64; 3]>,
}

/// What the lab's clock does not know: what a real processor takes for the things that are more than their instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Model {
    /// An exit from the guest, and the way back.
    pub exit_ns: u64,
    /// Leaving KVM for user space, and the way back.
    pub user_exit_ns: u64,
    /// A system call.
    pub syscall_ns: u64,
}

impl Figures {
    /// Reads what the scripts of this plan printed.
    pub fn read(plan: &Plan, text: &str) -> Result<Self> {
        let mut figures = Self::default();
        for &limit in &plan.limits {
            for &column in &plan.columns {
                let name = Section::times(limit, column);
                figures.times(limit, column, section(text, &name)?)?;
                let rows = plan.runs(limit);
                if let Some(row) = rows.iter().find(|row| !figures.runs.contains_key(&(limit, column, **row)))
                {
                    return Err(unreadable(&format!("{name}, without {row}")));
                }
                if plan.counts && column != Column::Host {
                    let name = Section::counts(limit, column);
                    let windows = windows(section(text, &name)?);
                    if windows.len() != rows.len() {
                        return Err(unreadable(&format!("{name}, with {} of {}", windows.len(), rows.len())));
                    }
                    let keys = rows.into_iter().map(|row| (limit, column, row));
                    figures.counts.extend(keys.zip(windows));
                }
            }
        }
        Ok(figures)
    }

    fn times(&mut self, limit: Limit, column: Column, text: &str) -> Result<()> {
        for line in text.lines().filter_map(|line| line.strip_prefix("row ")) {
            let (row, run) = times(line).ok_or_else(|| unreadable(line))?;
            self.runs.entry((limit, column, row)).or_default().push(run);
        }
        Ok(())
    }

    fn numbers(&self, key: Key, name: &str) -> Vec<f64> {
        let runs = self.runs.get(&key).into_iter().flatten();
        runs.filter_map(|run| run.get(name).copied()).map(float).collect()
    }

    fn median(&self, key: Key, name: &str) -> Option<f64> {
        Some(Spread::of(self.numbers(key, name))?.median)
    }

    /// How much longer the workload took than with nothing measured; 1 is twice as long.
    pub fn slowdown(&self, (limit, column, row): Key) -> Option<Spread> {
        let base = self.median((limit, column, row.base()), "ticks")?;
        Spread::of(
            self.numbers((limit, column, row), "ticks").iter().map(|ticks| ticks / base - 1.0).collect(),
        )
    }

    /// The same by a model of what real processors take.
    pub fn modelled_slowdown(&self, (limit, column, row): Key, model: Model) -> Option<f64> {
        let time = |row| {
            let key = (limit, column, row);
            let counts = match column {
                Column::Host => Counts::default(),
                _ => *self.counts.get(&key)?,
            };
            Some(self.median(key, "nanoseconds")? + model.nanoseconds(counts))
        };
        Some(time(row)? / time(row.base())? - 1.0)
    }

    /// The samples, where some are taken.
    pub fn samples(&self, (limit, column, row): Key) -> Option<Samples> {
        let key = (limit, column, row);
        let census = (limit, column, row.census()?);
        let at_once = self.median(census, "running")? / 100.0;
        let points = match row.measure {
            Measure::Record(period, ..) => (self.median(census, "count")? / float(period)).floor(),
            Measure::Rate(hertz, _) => self.median(key, "nanoseconds")? / 1e9 * f64::from(hertz),
            _ => return None,
        };
        // None at all has no line.
        let taken = self.median(key, "SAMPLE").unwrap_or_default();
        Some(Samples { taken, implied: (points * at_once).floor(), at_once })
    }

    /// What one of that costs which the row is about.
    pub fn cost(&self, (limit, column, row): Key) -> Option<Cost> {
        let key = (limit, column, row);
        let (of, number) = match row.measure {
            Measure::Record(..) | Measure::Rate(..) => {
                let samples = self.samples(key)?;
                ("a sampling point", samples.taken / samples.at_once)
            }
            Measure::Stat(..) if row.workload == Workload::Switches => ("a switch", float(row.units)),
            Measure::Interval(..) => ("an interval", self.median(key, "intervals")?),
            Measure::Read => ("a read", float(row.units / READ_EVERY)),
            Measure::Stat(..) | Measure::Nothing => return None,
        };
        let base = (limit, column, row.base());
        let time = self.median(key, "nanoseconds")? - self.median(base, "nanoseconds")?;
        let counts = self.counts.get(&key).zip(self.counts.get(&base)).map(|(with, without)| {
            let [with, without] =
                [with, without].map(|counts| [counts.exits, counts.user_exits, counts.calls]);
            std::array::from_fn(|i| (float(with[i]) - float(without[i])) / number)
        });
        (number > 0.0).then_some(Cost { of, nanoseconds: time / number, counts })
    }

    /// What the command took beside the workload, in nanoseconds.
    pub fn around(&self, key: Key) -> Option<f64> {
        let (ticks, time) = (self.median(key, "ticks")?, self.median(key, "nanoseconds")?);
        Some((self.median(key, "total")? - ticks) * time / ticks)
    }
}

impl Model {
    /// What others have measured. One AMD EPYC takes 1,360 cycles from before VMRUN to behind the #VMEXIT, and 1,160 between
    /// these and the ends of `KVM_RUN` (M. Roth, "KVM: SVM: use vmsave/vmload for saving/restoring additional host state", LKML,
    /// December 2020: <https://lkml.iu.edu/hypermail/linux/kernel/2012.2/00527.html>); this is at 2.5 GHz. A system call that does
    /// nothing takes 300 ns on a Skylake with its mitigations, and 100 without
    /// (<https://blog.i0.pm/posts/the-cost-of-a-syscall-measured-190303/>). The instructions of KVM and the kernel are in these
    /// as well as in the lab's time, so that the model is on the dear side.
    pub const PUBLISHED: Self = Self { exit_ns: 540, user_exit_ns: 460, syscall_ns: 300 };

    fn nanoseconds(self, counts: Counts) -> f64 {
        let Counts { exits, user_exits, calls } = counts;
        [(exits, self.exit_ns), (user_exits, self.user_exit_ns), (calls, self.syscall_ns)]
            .map(|(number, each)| float(number) * float(each))
            .iter()
            .sum()
    }
}

fn section<'a>(text: &'a str, name: &str) -> Result<&'a str> {
    Section::find(text, name).ok_or_else(|| unreadable(&format!("no {name}")))
}

fn unreadable(what: &str) -> Error {
    Error::Command(format!("the measuring script, which printed {what}"))
}

/// Counts are far from the 2^53 from which on they would be rounded.
#[expect(clippy::cast_precision_loss, reason = "said above")]
fn float(number: u64) -> f64 {
    number as f64
}

/// `ROW NAME NUMBER NAME NUMBER...`
fn times(line: &str) -> Option<(Row, Run)> {
    let mut words = line.split_whitespace();
    let row = words.next()?.parse().ok()?;
    let mut run = Run::new();
    while let Some(name) = words.next() {
        run.insert(name.to_owned(), words.next()?.parse().ok()?);
    }
    run.contains_key("ticks").then_some((row, run))
}

/// What was counted from each beginning of a workload to its end, as `perf script` has it: each hypercall's line is followed by
/// those of what was counted since the one before it.
fn windows(text: &str) -> Vec<Counts> {
    let mut windows = Vec::new();
    let mut at_end = false;
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [_time, number, event, rest @ ..] = &*words else { continue };
        if *event == "kvm:kvm_hypercall:" {
            at_end = match code(rest) {
                Some(BEGIN) => false,
                Some(END) => {
                    windows.push(Counts::default());
                    true
                }
                _ => at_end,
            };
        } else if let (true, Some(counts), Ok(number)) = (at_end, windows.last_mut(), number.parse()) {
            match *event {
                "kvm:kvm_exit:" => counts.exits = number,
                "kvm:kvm_userspace_exit:" => counts.user_exits = number,
                "raw_syscalls:sys_enter:" => counts.calls = number,
                _ => {}
            }
        }
    }
    windows
}

fn code(words: &[&str]) -> Option<u32> {
    let ["nr", code, ..] = words else { return None };
    u32::from_str_radix(code.strip_prefix("0x")?, 16).ok()
}
