//! What a vCPU came out of the guest for, counted, and how much of the time its PMU takes.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::arch::Arch;
use crate::architecture::Architecture;
use crate::exit::Kind;

/// How often `KVM_RUN` returned, and why.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exits {
    /// The guest read from a port.
    pub port_reads: u64,
    /// It wrote to one.
    pub port_writes: u64,
    /// It read a device's register in memory.
    pub memory_reads: u64,
    /// It wrote to one.
    pub memory_writes: u64,
    /// It read a register of the PMU's.
    pub pmu_reads: u64,
    /// It wrote to one.
    pub pmu_writes: u64,
    /// A signal came: an alarm of a counter's, or somebody's question.
    pub signals: u64,
    /// Anything else.
    pub others: u64,
}

impl Exits {
    /// Counts one more.
    pub fn count(&mut self, kind: Kind) {
        let count = match kind {
            Kind::PortRead => &mut self.port_reads,
            Kind::PortWrite => &mut self.port_writes,
            Kind::MemoryRead => &mut self.memory_reads,
            Kind::MemoryWrite => &mut self.memory_writes,
            Kind::PmuRead => &mut self.pmu_reads,
            Kind::PmuWrite => &mut self.pmu_writes,
            Kind::Signal => &mut self.signals,
            Kind::Other => &mut self.others,
        };
        *count += 1;
    }

    /// Returns the exits since `before`.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            port_reads: self.port_reads.saturating_sub(before.port_reads),
            port_writes: self.port_writes.saturating_sub(before.port_writes),
            memory_reads: self.memory_reads.saturating_sub(before.memory_reads),
            memory_writes: self.memory_writes.saturating_sub(before.memory_writes),
            pmu_reads: self.pmu_reads.saturating_sub(before.pmu_reads),
            pmu_writes: self.pmu_writes.saturating_sub(before.pmu_writes),
            signals: self.signals.saturating_sub(before.signals),
            others: self.others.saturating_sub(before.others),
        }
    }

    /// Returns each reason in words, and how often it was that.
    pub fn by_reason(&self) -> [(&'static str, u64); 8] {
        [
            ("PMU reads", self.pmu_reads),
            ("PMU writes", self.pmu_writes),
            ("port reads", self.port_reads),
            ("port writes", self.port_writes),
            ("memory reads", self.memory_reads),
            ("memory writes", self.memory_writes),
            ("signals", self.signals),
            ("others", self.others),
        ]
    }

    /// Returns how many there were.
    pub fn total(&self) -> u64 {
        self.by_reason().iter().map(|(_, count)| count).sum()
    }
}

/// How long the PMU's exits take, in ticks of the processor's clock, while somebody watches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Those that have passed since somebody first asked.
    pub all: u64,
    /// Of these, those between such an exit and the next entry into the guest. What KVM itself does at an exit is not in them.
    pub pmu: u64,
}

/// Measures that share, while it is asked for.
#[derive(Debug, Default)]
pub struct Stopwatch {
    watched: Option<Watched>,
}

#[derive(Debug)]
struct Watched {
    since: u64,
    pmu: u64,
    /// When the exit was that is being dealt with, if it is for the PMU.
    exit: Option<u64>,
    asked: Instant,
}

impl Stopwatch {
    /// The guest has come out for its PMU.
    pub fn exits_for_pmu(&mut self) {
        if let Some(watched) = &mut self.watched {
            watched.exit = Some(Arch::ticks());
        }
    }

    /// It is about to go on.
    pub fn enters(&mut self) {
        if let Some(watched) = &mut self.watched
            && let Some(exit) = watched.exit.take()
        {
            watched.pmu += Arch::ticks().saturating_sub(exit);
        }
    }

    /// The share so far, which is measured from the first time that somebody asks.
    pub fn share(&mut self) -> Share {
        let now = Arch::ticks();
        let asked = Instant::now();
        let watched = self.watched.get_or_insert(Watched { since: now, pmu: 0, exit: None, asked });
        watched.asked = asked;
        // What goes on is a part of what was up to now, and of nothing later.
        if let Some(exit) = &mut watched.exit {
            watched.pmu += now.saturating_sub(std::mem::replace(exit, now));
        }
        Share { all: now.saturating_sub(watched.since), pmu: watched.pmu }
    }

    /// Stops if nobody has asked for some time.
    pub fn rest(&mut self) {
        const INTEREST: Duration = Duration::from_mins(1);
        if self.watched.as_ref().is_some_and(|watched| watched.asked.elapsed() > INTEREST) {
            self.watched = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits for the next tick, which on some processors takes longer than many instructions.
    fn tick() {
        let now = Arch::ticks();
        while Arch::ticks() == now {}
    }

    #[test]
    fn nothing_is_measured_before_somebody_asks() {
        let mut watch = Stopwatch::default();
        watch.exits_for_pmu();
        watch.enters();
        assert_eq!(watch.share().pmu, 0);
        watch.exits_for_pmu();
        tick();
        watch.enters();
        tick();
        let share = watch.share();
        assert!(share.pmu > 0 && share.pmu < share.all, "{share:?}");
    }

    #[test]
    fn an_exit_that_takes_long_is_no_more_than_all_of_the_time() {
        let mut watch = Stopwatch::default();
        watch.share();
        watch.exits_for_pmu();
        std::thread::sleep(Duration::from_millis(20));
        let before = watch.share();
        watch.enters();
        let after = watch.share();
        assert!(after.pmu - before.pmu <= after.all - before.all, "{before:?}, then {after:?}");
    }

    #[test]
    fn other_exits_are_not_the_pmus() {
        let mut watch = Stopwatch::default();
        watch.share();
        watch.enters();
        assert_eq!(watch.share().pmu, 0);
    }
}
