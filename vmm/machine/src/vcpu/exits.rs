//! Counts a vCPU's exits by reason, and measures the part of the time that exits for the PMU take.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::arch::ticks;
use crate::exit::ExitKind;

/// Numbers of exits to Tally (returns of `KVM_RUN`), by reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exits {
    /// Reads from I/O ports.
    pub port_reads: u64,
    /// Writes to I/O ports.
    pub port_writes: u64,
    /// Reads from devices' registers in memory.
    pub memory_reads: u64,
    /// Writes to devices' registers in memory.
    pub memory_writes: u64,
    /// Reads from PMU registers.
    pub pmu_reads: u64,
    /// Writes to PMU registers.
    pub pmu_writes: u64,
    /// Signals, from a counter's alarm, a timer or another thread.
    pub signals: u64,
    /// All other exits.
    pub others: u64,
}

impl Exits {
    /// Counts one exit of this kind.
    pub fn count(&mut self, kind: ExitKind) {
        let count = match kind {
            ExitKind::PortRead => &mut self.port_reads,
            ExitKind::PortWrite => &mut self.port_writes,
            ExitKind::MemoryRead => &mut self.memory_reads,
            ExitKind::MemoryWrite => &mut self.memory_writes,
            ExitKind::PmuRead => &mut self.pmu_reads,
            ExitKind::PmuWrite => &mut self.pmu_writes,
            ExitKind::Signal => &mut self.signals,
            ExitKind::Other => &mut self.others,
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
}

/// Time that exits for the PMU take, in ticks of the processor's clock. It is measured only while a client asks for it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Share {
    /// Ticks since the measurement began, at a client's first request.
    pub all: u64,
    /// Ticks between exits for the PMU and the next entries into the guest. The time that KVM itself takes is not
    /// included.
    pub pmu: u64,
}

/// Measures [`Share`] while clients request it.
#[derive(Debug, Default)]
pub struct Stopwatch {
    watched: Option<Watched>,
}

#[derive(Debug)]
struct Watched {
    since: u64,
    pmu: u64,
    /// Time of the exit that is being handled, if it is for the PMU.
    exit: Option<u64>,
    asked: Instant,
}

impl Stopwatch {
    /// Records an exit for the PMU.
    pub fn exits_for_pmu(&mut self) {
        if let Some(watched) = &mut self.watched {
            watched.exit = Some(ticks());
        }
    }

    /// Records that the vCPU is about to enter the guest.
    pub fn enters(&mut self) {
        if let Some(watched) = &mut self.watched
            && let Some(exit) = watched.exit.take()
        {
            watched.pmu += ticks().saturating_sub(exit);
        }
    }

    /// Returns the share so far, and starts to measure it at the first call.
    pub fn share(&mut self) -> Share {
        let now = ticks();
        let asked = Instant::now();
        let watched = self.watched.get_or_insert(Watched { since: now, pmu: 0, exit: None, asked });
        watched.asked = asked;
        // The exit that is being handled counts up to now for this answer, and from now on for the next.
        if let Some(exit) = &mut watched.exit {
            watched.pmu += now.saturating_sub(std::mem::replace(exit, now));
        }
        Share { all: now.saturating_sub(watched.since), pmu: watched.pmu }
    }

    /// Stops measuring if no client has asked for a minute.
    pub fn stop_if_unwatched(&mut self) {
        const TIMEOUT: Duration = Duration::from_mins(1);
        if self.watched.as_ref().is_some_and(|watched| watched.asked.elapsed() > TIMEOUT) {
            self.watched = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits for the next tick; on some processors a tick is longer than many instructions.
    fn tick() {
        let now = ticks();
        while ticks() == now {}
    }

    #[test]
    fn nothing_is_measured_before_a_client_asks() {
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
    fn the_pmus_time_never_exceeds_the_whole_time() {
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
    fn other_exits_do_not_count_as_the_pmus_time() {
        let mut watch = Stopwatch::default();
        watch.share();
        watch.enters();
        assert_eq!(watch.share().pmu, 0);
    }
}
