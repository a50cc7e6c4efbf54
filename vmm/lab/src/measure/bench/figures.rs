//! The numbers that the scripts printed, and what is computed from them.

use std::collections::BTreeMap;

use super::plan::{Column, Measure, Row, Workload};
use super::script::{Limit, Plan, Section};
use super::{BEGIN, END, READ_EVERY};
use crate::error::{Error, Result};

/// Names and numbers that one run of a row printed.
type Run = BTreeMap<String, u64>;

/// Counts of the host's work while the workload ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Exits from the guest, whether KVM or user space handled them.
    pub exits: u64,
    /// Exits to user space among them.
    pub user_exits: u64,
    /// System calls of the vCPU's thread, `KVM_RUN` included.
    pub calls: u64,
}

/// A cell of the table, under one limit.
type Key = (Limit, Column, Row);

/// All measurements.
#[derive(Debug, Default)]
pub struct Figures {
    runs: BTreeMap<Key, Vec<Run>>,
    counts: BTreeMap<Key, Vec<Counts>>,
}

/// Median and range of a number that was measured several times.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    pub median: f64,
    /// Difference of the largest and the smallest.
    pub range: f64,
}

impl Spread {
    fn of(mut numbers: Vec<f64>) -> Option<Self> {
        numbers.sort_unstable_by(f64::total_cmp);
        let (least, most) = (numbers.first()?, numbers.last()?);
        Some(Self { median: numbers[numbers.len() / 2], range: most - least })
    }
}

/// Number of samples.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Samples {
    /// Number of samples in perf's file.
    pub taken: f64,
    /// Number of samples that follows from the event's count, or from the time.
    pub implied: f64,
    /// Number of events that were counted at a time. Each overflow takes a sample of each of them.
    pub at_once: f64,
}

/// Cost of one operation, such as a sampling point or a task switch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// Name of the operation.
    pub of: &'static str,
    /// Nanoseconds, which in the lab are instructions.
    pub nanoseconds: f64,
    /// Exits, exits to user space, and system calls, if they were counted.
    pub counts: Option<[f64; 3]>,
}

/// Time that operations take on a real processor beside their instructions, which the lab's clock does not include.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Model {
    /// An exit from the guest and the next entry.
    pub exit_ns: u64,
    /// The return from KVM to user space and the next `KVM_RUN`.
    pub user_exit_ns: u64,
    /// A system call.
    pub syscall_ns: u64,
}

impl Figures {
    /// Reads the output of this plan's scripts.
    pub fn read(plan: &Plan, text: &str) -> Result<Self> {
        let mut figures = Self::default();
        for limit in plan.used_limits() {
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
                    // All runs of a row come before the next row.
                    let (repeat, expected) = (plan.repeat as usize, rows.len() * plan.repeat as usize);
                    if windows.len() != expected {
                        return Err(unreadable(&format!("{name}, with {} of {expected}", windows.len())));
                    }
                    let keys = rows.into_iter().map(|row| (limit, column, row));
                    figures.counts.extend(keys.zip(windows.chunks(repeat).map(<[Counts]>::to_vec)));
                }
            }
        }
        Ok(figures)
    }

    /// Reads a section of times.
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

    /// Returns the median of each of the host's counts.
    fn counted(&self, key: Key) -> Option<Counts> {
        let runs = self.counts.get(&key)?;
        let median = |number: fn(&Counts) -> u64| {
            let mut numbers: Vec<u64> = runs.iter().map(number).collect();
            numbers.sort_unstable();
            numbers.get(numbers.len() / 2).copied()
        };
        Some(Counts {
            exits: median(|run| run.exits)?,
            user_exits: median(|run| run.user_exits)?,
            calls: median(|run| run.calls)?,
        })
    }

    /// Returns how much longer the workload took than with nothing measured. 1 is twice as long.
    pub fn slowdown(&self, (limit, column, row): Key) -> Option<Spread> {
        let base = self.median((limit, column, row.base()), "ticks")?;
        Spread::of(
            self.numbers((limit, column, row), "ticks").iter().map(|ticks| ticks / base - 1.0).collect(),
        )
    }

    /// Returns the slowdown with the model's times of a real processor added.
    pub fn modelled_slowdown(&self, (limit, column, row): Key, model: Model) -> Option<f64> {
        let time = |row| {
            let key = (limit, column, row);
            let counts = match column {
                Column::Host => Counts::default(),
                _ => self.counted(key)?,
            };
            Some(self.median(key, "nanoseconds")? + model.nanoseconds(counts))
        };
        Some(time(row)? / time(row.base())? - 1.0)
    }

    /// Returns the workload's time in nanoseconds, and the host's counts, if there are any.
    pub fn took(&self, key: Key) -> Option<(f64, Option<Counts>)> {
        Some((self.median(key, "nanoseconds")?, self.counted(key)))
    }

    /// Returns the number of samples if the row takes samples.
    pub fn samples(&self, (limit, column, row): Key) -> Option<Samples> {
        let key = (limit, column, row);
        let counting = (limit, column, row.counting()?);
        let at_once = self.median(counting, "running")? / 100.0;
        let points = match row.measure {
            Measure::Record(period, ..) => (self.median(counting, "count")? / float(period)).floor(),
            Measure::Rate(hertz, _) => self.median(key, "nanoseconds")? / 1e9 * f64::from(hertz),
            _ => return None,
        };
        // Without any samples, perf prints no number.
        let taken = self.median(key, "SAMPLE").unwrap_or_default();
        Some(Samples { taken, implied: (points * at_once).floor(), at_once })
    }

    /// Returns the number of the PMU's interrupts if the row takes samples.
    pub fn interrupts(&self, key: Key) -> Option<f64> {
        key.2.measure.samples().then(|| self.median(key, "interrupts"))?
    }

    /// Returns the cost of one operation of the row.
    pub fn cost(&self, (limit, column, row): Key) -> Option<Cost> {
        let key = (limit, column, row);
        let (of, number) = match row.measure {
            Measure::Record(..) | Measure::Rate(..) => {
                let samples = self.samples(key)?;
                ("a sampling point", samples.taken / samples.at_once)
            }
            Measure::Stat(..) if row.workload == Workload::Switches => ("a switch", float(row.units)),
            Measure::Interval(..) => ("an interval", self.median(key, "intervals")?),
            Measure::Read(_) => ("a read", float(row.units / READ_EVERY)),
            Measure::Stat(..) | Measure::Nothing => return None,
        };
        let base = (limit, column, row.base());
        let time = self.median(key, "nanoseconds")? - self.median(base, "nanoseconds")?;
        let counts = self.counted(key).zip(self.counted(base)).map(|(with, without)| {
            let [with, without] =
                [with, without].map(|counts| [counts.exits, counts.user_exits, counts.calls]);
            std::array::from_fn(|i| (float(with[i]) - float(without[i])) / number)
        });
        (number > 0.0).then_some(Cost { of, nanoseconds: time / number, counts })
    }

    /// Returns the time in nanoseconds that the command took outside the workload's rounds.
    pub fn start_and_end(&self, key: Key) -> Option<f64> {
        let (ticks, time) = (self.median(key, "ticks")?, self.median(key, "nanoseconds")?);
        Some((self.median(key, "total")? - ticks) * time / ticks)
    }
}

impl Model {
    /// Published measurements. An AMD EPYC takes 1,360 cycles from before VMRUN until after the #VMEXIT, and 1,160
    /// between these points and the ends of `KVM_RUN` (M. Roth, LKML, December 2020); the times are for 2.5 GHz. A
    /// system call that does nothing takes 300 ns on a Skylake with mitigations, and 100 ns without. These times
    /// include the instructions of KVM and the kernel, which the lab counts as well, so the model overestimates the
    /// cost.
    pub const PUBLISHED: Self = Self { exit_ns: 540, user_exit_ns: 460, syscall_ns: 300 };
    /// The sources of these numbers.
    pub const SOURCES: &str = "https://lkml.iu.edu/hypermail/linux/kernel/2012.2/00527.html,\n\
                               https://blog.i0.pm/posts/the-cost-of-a-syscall-measured-190303/";

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

/// Converts a count, which is far below 2^53, so it is not rounded.
#[expect(clippy::cast_precision_loss, reason = "counts are below 2^53")]
fn float(number: u64) -> f64 {
    number as f64
}

/// Reads a line `ROW NAME NUMBER NAME NUMBER...`.
fn times(line: &str) -> Option<(Row, Run)> {
    let mut words = line.split_whitespace();
    let row = words.next()?.parse().ok()?;
    let mut run = Run::new();
    while let Some(name) = words.next() {
        run.insert(name.to_owned(), words.next()?.parse().ok()?);
    }
    run.contains_key("ticks").then_some((row, run))
}

/// Reads the counts from each start of a workload to its end from the output of `perf script`. The line of each
/// hypercall is followed by the lines of the counts since the previous hypercall.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::bench::plan::Length;
    use crate::simulator::board::Processor;

    const ROW: &str = "loop/3000000/record:1000:2";
    /// Number of runs of each row.
    const PLANNED: u32 = 3;

    fn plan() -> Plan {
        let row = Row::new(Workload::Loop, "record:1000:2".parse().unwrap(), Length::Usual);
        assert_eq!(row.to_string(), ROW);
        Plan {
            host: Processor::Amd,
            rows: vec![row],
            columns: vec![Column::Host, Column::Kvm],
            limits: vec![Limit::None],
            repeat: PLANNED,
            counts: true,
        }
    }

    /// Returns the output of one run of the base and three runs of the row, with these ticks. A tick is two
    /// nanoseconds.
    fn times(base: u64, with: [u64; 3]) -> String {
        let run = |row: &str, ticks: u64, rest: &str| {
            format!(
                "row {row} ticks {ticks} nanoseconds {} units 3 total {}{rest}\r\n",
                ticks * 2,
                ticks + 50
            )
        };
        let mut text = run("loop/3000000/nothing", base, "");
        text += &run("loop/3000000/stat:2", base, " count 3000999 running 200 intervals 0");
        with.iter().fold(text, |text, ticks| text + &run(ROW, *ticks, " SAMPLE 5000"))
    }

    fn text() -> String {
        let mark = |code: u32, [exits, user, calls]: [u64; 3]| {
            format!(
                "1.0: 1 kvm:kvm_hypercall: nr {code:#x} a0 0x0\n1.0: {exits} kvm:kvm_exit: \n\
                 1.0: {user} kvm:kvm_userspace_exit: \n1.0: {calls} raw_syscalls:sys_enter: \n"
            )
        };
        let window = |counts| mark(BEGIN, [99; 3]) + &mark(11, [99; 3]) + &mark(END, counts);
        let alone = window([10, 0, 3]).repeat(PLANNED as usize);
        let with = [[25_010, 0, 90_000], [0, 5_000, 10_003], [90_000, 9_000, 0]].map(window).concat();
        let counts = alone.repeat(2) + &with;
        let sections = [
            ("l1.none.times", times(1000, [1100, 1500, 1200])),
            ("kvm.none.times", times(2000, [5000, 5000, 5000])),
            ("kvm.none.counts", counts),
        ];
        sections.map(|(name, text)| format!("begin {name}\n{text}end of this\n")).concat()
    }

    fn figures() -> (Figures, [Key; 2]) {
        let plan = plan();
        let keys = [Column::Host, Column::Kvm].map(|column| (Limit::None, column, plan.rows[0]));
        (Figures::read(&plan, &text()).unwrap(), keys)
    }

    #[test]
    fn a_slowdown_is_the_median_of_the_runs() {
        let (figures, [host, kvm]) = figures();
        let slowdown = figures.slowdown(host).unwrap();
        assert!((slowdown.median - 0.2).abs() < 1e-9 && (slowdown.range - 0.4).abs() < 1e-9, "{slowdown:?}");
        assert!((figures.slowdown(kvm).unwrap().median - 1.5).abs() < 1e-9);
        assert_eq!(figures.start_and_end(kvm), Some(100.0));
        assert_eq!(figures.took(host), Some((2400.0, None)));
    }

    #[test]
    fn samples_are_compared_with_the_number_that_follows_from_the_count() {
        let (figures, [host, _]) = figures();
        // 3,000,999 instructions are 3,000 periods, of two events each.
        assert_eq!(figures.samples(host), Some(Samples { taken: 5000.0, implied: 6000.0, at_once: 2.0 }));
    }

    #[test]
    fn a_sampling_point_is_an_overflow_of_all_events() {
        let (figures, [host, kvm]) = figures();
        let cost = figures.cost(host).unwrap();
        assert_eq!((cost.of, cost.nanoseconds, cost.counts), ("a sampling point", 400.0 / 2500.0, None));
        assert_eq!(figures.cost(kvm).unwrap().counts, Some([10.0, 2.0, 4.0]));
    }

    #[test]
    fn a_model_adds_the_time_of_exits_and_system_calls() {
        let (figures, [host, kvm]) = figures();
        let model = Model { exit_ns: 1, user_exit_ns: 10, syscall_ns: 100 };
        // 4,000 ns and 310 without, 10,000 ns and 25,010 + 50,000 + 1,000,300 with.
        let slowdown = figures.modelled_slowdown(kvm, model).unwrap();
        assert!((slowdown - (1_085_310.0 / 4_310.0 - 1.0)).abs() < 1e-9, "{slowdown}");
        assert_eq!(figures.modelled_slowdown(host, model), Some(2400.0 / 2000.0 - 1.0));
    }

    #[test]
    fn what_was_not_measured_is_an_error() {
        let whole = text();
        for (missing, instead) in
            [("kvm.none.counts", "other"), ("stat:2", "stat:3"), ("ticks 1000", "ticks x")]
        {
            let text = whole.replace(missing, instead);
            assert!(Figures::read(&plan(), &text).is_err(), "{missing}");
        }
        assert!(Figures::read(&plan(), &whole.replacen("0x7a120000", "0xb", 1)).is_err());
    }
}
