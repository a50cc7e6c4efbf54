//! Counts in the windows between marks, read from the output of ftrace and `perf script`.

use std::collections::{BTreeMap, BTreeSet};

use super::mark::{END, Mark, Work};
use super::per_unit::PerUnit;
use super::{ROUNDS, riscv64};

/// A quantity that is counted.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Quantity {
    /// Exits from the guest, whether KVM or user space handles them.
    Exits,
    /// `KVM_RUN`s, each of which ends with an exit to user space.
    Runs,
    /// All other system calls of the vCPU's thread.
    OtherCalls,
    /// One of the other system calls.
    Call(String),
    /// Virtual time, which is the number of all instructions.
    Nanoseconds,
    /// Instructions of the vCPU's thread in user mode of the host.
    HostUserInstructions,
    GuestInstructions,
}

type Counts = BTreeMap<Quantity, i64>;

/// The counts from each mark to the next, in order. `None` is the end mark.
#[derive(Default)]
pub struct Windows(Vec<(Option<Mark>, Counts)>);

impl Windows {
    /// Reads ftrace's output: the exits and system calls of the thread that the marks are from.
    pub fn from_trace(text: &str) -> Self {
        let mut windows = Self::default();
        let mut vcpu = "";
        for line in text.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            let [thread, _processor, _flags, _time, event, rest @ ..] = &*words else { continue };
            if let ("kvm_hypercall:" | "mark:", Some(mark)) = (*event, mark(rest)) {
                vcpu = thread;
                windows.0.push((mark, Counts::new()));
            } else if *thread == vcpu
                && let Some((_, counts)) = windows.0.last_mut()
            {
                count(counts, event, rest);
            }
        }
        windows
    }

    /// Reads the output of `perf script`: each mark has a time, and the counts since the previous mark.
    pub fn from_samples(text: &str) -> Self {
        let mut windows = Self::default();
        let mut last = 0;
        for line in text.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            let [time, period, event, rest @ ..] = &*words else { continue };
            let (quantity, number) = match *event {
                "kvm:kvm_hypercall:" | "kprobes:mark:" | "kprobes:own_mark:" => {
                    let Some(mark) = mark(rest) else { continue };
                    windows.0.push((mark, Counts::new()));
                    let now = number(&time.replace('.', ""));
                    (Quantity::Nanoseconds, now - std::mem::replace(&mut last, now))
                }
                "instructions:Hu:" => (Quantity::HostUserInstructions, number(period)),
                "instructions:G:" => (Quantity::GuestInstructions, number(period)),
                _ => continue,
            };
            // The last window has just begun, so the count is that of the window before it.
            if let [.., (_, counts), _] = &mut *windows.0 {
                counts.insert(quantity, number);
            }
        }
        windows
    }

    /// Returns the cost of a unit, or `None` if windows of this work are missing.
    pub fn cost(&self, work: Work, events: u8, quantity: &Quantity) -> Option<PerUnit> {
        let of_this = self.0.iter().filter_map(|(mark, _)| *mark).filter(|mark| mark.is_of(work, events));
        let units: BTreeSet<u8> = of_this.map(|mark| mark.units).collect();
        let (few, many) = (*units.first()?, *units.last()?);
        let count = |units| self.undisturbed(Mark { work, events, units }, quantity);
        let difference = i64::from(many - few);
        (difference > 0).then_some(())?;
        Some(PerUnit { halves: (count(many)? - count(few)?) * 2 / difference })
    }

    /// Returns the system calls in the windows of this work, except `KVM_RUN`, with the number of each per unit.
    pub fn calls(&self, work: Work, events: u8) -> Vec<(String, PerUnit)> {
        let of_this = |mark: &Option<Mark>| mark.is_some_and(|mark| mark.is_of(work, events));
        let seen: BTreeSet<&Quantity> =
            self.0.iter().filter(|(mark, _)| of_this(mark)).flat_map(|(_, counts)| counts.keys()).collect();
        seen.into_iter()
            .filter_map(|quantity| match quantity {
                Quantity::Call(name) => Some((name.clone(), self.cost(work, events, quantity)?)),
                _ => None,
            })
            .filter(|(_, cost)| *cost != PerUnit::default())
            .collect()
    }

    /// Returns the count of a window without a timer interrupt. An interrupt only adds to a count, so such a count is
    /// among the smaller ones. The lower quartile is used and not the minimum, which may be an exception of another
    /// kind.
    fn undisturbed(&self, mark: Mark, quantity: &Quantity) -> Option<i64> {
        let windows = self.0.iter().filter(|(of, _)| *of == Some(mark));
        let mut numbers: Vec<i64> =
            windows.map(|(_, counts)| counts.get(quantity).copied().unwrap_or(0)).collect();
        numbers.sort_unstable();
        (numbers.len() == usize::from(ROUNDS)).then(|| numbers[numbers.len() / 4])
    }
}

/// Returns the mark of a hypercall or an instruction, `Some(None)` for the end mark, and `None` if there is no mark.
#[expect(clippy::option_option, reason = "the end is a mark too")]
fn mark(words: &[&str]) -> Option<Option<Mark>> {
    let hexadecimal = |text: &str| u32::from_str_radix(text, 16).ok();
    let code = match words {
        ["nr", code, ..] => hexadecimal(code.strip_prefix("0x")?)?,
        [.., instruction] => {
            END | riscv64::decode(hexadecimal(instruction.strip_prefix("instruction=0x")?)?)?
        }
        [] => return None,
    };
    let mark = Mark::from_code(code);
    (mark.is_some() || code == END).then_some(mark)
}

fn number(text: &str) -> i64 {
    text.trim_end_matches(':').parse().unwrap_or_default()
}

/// Counts an event of ftrace's output.
fn count(counts: &mut Counts, event: &str, words: &[&str]) {
    let mut add = |quantity| *counts.entry(quantity).or_default() += 1;
    match (event, words) {
        ("kvm_exit:", _) => add(Quantity::Exits),
        ("sys_enter:", ["NR", call, _first, second, ..]) => match name(call, second.trim_end_matches(',')) {
            name if name == "KVM_RUN" => add(Quantity::Runs),
            name => {
                add(Quantity::OtherCalls);
                add(Quantity::Call(name));
            }
        },
        _ => {}
    }
}

/// Returns the name of a system call, or of the request for `ioctl`. The numbers are those of x86-64 and of RISC-V.
fn name(call: &str, argument: &str) -> String {
    let known = match (call, argument) {
        ("16" | "29", "ae80") => "KVM_RUN",
        ("16", "c008ae88") => "KVM_GET_MSRS",
        ("16", "4008ae89") => "KVM_SET_MSRS",
        ("16", "4020aea5") => "KVM_SIGNAL_MSI",
        ("29", "4010aeab") => "KVM_GET_ONE_REG",
        ("29", "4010aeac") => "KVM_SET_ONE_REG",
        ("29", "4018aee1") => "KVM_SET_DEVICE_ATTR",
        ("29", "4018aee2") => "KVM_GET_DEVICE_ATTR",
        ("16" | "29", "2400") => "PERF_EVENT_IOC_ENABLE",
        ("16" | "29", "2401") => "PERF_EVENT_IOC_DISABLE",
        ("16" | "29", "40082404") => "PERF_EVENT_IOC_PERIOD",
        ("128" | "137", _) => "rt_sigtimedwait",
        ("0" | "63", _) => "read",
        ("16" | "29", request) => return format!("ioctl {request}"),
        (call, _) => return format!("system call {call}"),
    };
    known.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the text of windows, each of which starts with a mark. A window costs three, and one more for each unit.
    fn windows(line: impl Fn(u8, u32) -> String, mark: impl Fn(u32) -> String) -> String {
        let mut text = String::new();
        for _ in 0..ROUNDS {
            for units in Work::Read.units() {
                text += &mark(Mark { work: Work::Read, events: 1, units }.code());
                text += &line(units, 3 + u32::from(units));
            }
        }
        text + &mark(END)
    }

    #[test]
    fn the_cost_of_a_unit_is_read_from_a_trace() {
        let trace = windows(
            |_, exits| {
                let exit = "vcpu0-9 [000] ..... 1.0: kvm_exit: vcpu 0 reason msr rip 0x0\n\
                            vcpu0-9 [000] ..... 1.0: sys_enter: NR 16 (10, ae80, 0, 0, 0, 0)\n\
                            tally-8 [000] ..... 1.0: sys_enter: NR 0 (3, 0, 0, 0, 0, 0)\n";
                exit.repeat(exits as usize) + "vcpu0-9 [000] ..... 1.0: sys_enter: NR 15 (0, 0, 0, 0, 0, 0)\n"
            },
            |code| format!("vcpu0-9 [000] ..... 1.0: kvm_hypercall: nr {code:#x} a0 0x0\n"),
        );
        let windows = Windows::from_trace(&trace);
        let cost = |quantity| windows.cost(Work::Read, 1, &quantity);
        assert_eq!(cost(Quantity::Exits), Some(PerUnit::whole(1)));
        assert_eq!(cost(Quantity::Runs), Some(PerUnit::whole(1)));
        assert_eq!(
            cost(Quantity::OtherCalls),
            Some(PerUnit::whole(0)),
            "one in each window, and another thread's"
        );
        assert_eq!(windows.cost(Work::Read, 6, &Quantity::Exits), None, "there are no such windows");
        assert_eq!(windows.calls(Work::Read, 1), []);
    }

    #[test]
    fn the_cost_of_a_unit_is_read_from_samples() {
        let clock = std::cell::Cell::new(5_000_000_000_u64);
        let samples = windows(
            |_, time| {
                clock.update(|now| now + u64::from(time) * 100);
                String::new()
            },
            |code| {
                let now = clock.get();
                let time = format!("{}.{:09}", now / 1_000_000_000, now % 1_000_000_000);
                let guest = now / 100;
                format!(
                    "{time}: 1 kvm:kvm_hypercall: nr {code:#x} a0 0x0\n{time}: {guest} instructions:G: \n"
                )
            },
        );
        let windows = Windows::from_samples(&samples);
        assert_eq!(windows.cost(Work::Read, 1, &Quantity::Nanoseconds), Some(PerUnit::whole(100)));
    }
}
