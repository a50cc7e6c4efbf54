//! Estimates what an event has missed without hardware: its average rate while it was on the PMU, times the length of
//! the starvation.
//!
//! An event's enabled time is the CPU time of its thread, but stands still while the event is in error state. So the
//! length of a starvation is the difference of the two.

use std::mem::zeroed;

use crate::page::ScheduledOut;

/// Estimate of what one event has missed.
pub struct Estimate {
    /// The thread's CPU time minus the event's enabled time, when the event was last known to count.
    base: u64,
    /// Counts missed in starvations that are over.
    past: u64,
    /// The starvation that is not over, if there is one.
    open: Option<Starvation>,
}

/// A starvation that is not over.
struct Starvation {
    /// State of the event when it lost its hardware.
    state: ScheduledOut,
    /// Counts missed so far.
    missed: u64,
}

impl Estimate {
    /// Creates the estimate of an event that counts and has been enabled for so many nanoseconds.
    pub fn new(enabled: u64) -> Self {
        Self { base: thread_time().saturating_sub(enabled), past: 0, open: None }
    }

    /// Records that the event has no hardware. `state` is its state when it lost the hardware.
    pub fn starved(&mut self, state: ScheduledOut) {
        self.starved_at(state, thread_time());
    }

    /// Records that the event counts. `enabled` returns its enabled time, and is called only if the event was starved
    /// before.
    pub fn scheduled(&mut self, enabled: impl FnOnce() -> Option<u64>) {
        if self.open.is_some()
            && let Some(enabled) = enabled()
        {
            self.scheduled_at(enabled, thread_time());
        }
    }

    /// Returns the counts missed so far.
    pub fn missed(&self) -> u64 {
        self.past.saturating_add(self.open.as_ref().map_or(0, |starvation| starvation.missed))
    }

    fn starved_at(&mut self, state: ScheduledOut, now: u64) {
        let length = now.saturating_sub(self.base).saturating_sub(state.enabled);
        let before = self.open.as_ref().map_or(0, |starvation| starvation.missed);
        self.open = Some(Starvation { state, missed: missed(state, length).max(before) });
    }

    fn scheduled_at(&mut self, enabled: u64, now: u64) {
        let Some(Starvation { state, missed: before }) = self.open.take() else { return };
        let base = now.saturating_sub(enabled);
        let length = base.saturating_sub(self.base);
        self.past = self.past.saturating_add(missed(state, length).max(before));
        self.base = base;
    }
}

/// Returns the counts that an event missed in `time` nanoseconds.
fn missed(state: ScheduledOut, time: u64) -> u64 {
    let missed = u128::from(state.count) * u128::from(time) / u128::from(state.running.max(1));
    // The rate of an event that never had hardware is unknown.
    if state.running == 0 { 0 } else { u64::try_from(missed).unwrap_or(u64::MAX) }
}

/// Returns the CPU time of this thread, in nanoseconds.
fn thread_time() -> u64 {
    // SAFETY: all-zero is a valid `timespec`.
    let mut time: libc::timespec = unsafe { zeroed() };
    // SAFETY: `time` is valid for writes.
    if unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) } < 0 {
        return 0;
    }
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_starvation_is_filled_at_the_rate_before_it() {
        let mut estimate = Estimate { base: 1000, past: 0, open: None };
        let state = ScheduledOut { count: 900, enabled: 300, running: 300 };
        estimate.starved_at(state, 1400);
        assert_eq!(estimate.missed(), 300, "100 ns at 3 a nanosecond");
        estimate.starved_at(state, 1450);
        assert_eq!(estimate.missed(), 450);
        estimate.scheduled_at(310, 1500);
        assert_eq!(estimate.missed(), 570, "enabled for 310 of 500 ns: 190 were missed");
        let state = ScheduledOut { count: 1200, enabled: 400, running: 400 };
        estimate.starved_at(state, 1600);
        assert_eq!(estimate.missed(), 570 + 30, "the next starvation has lasted 10 ns");
    }

    #[test]
    fn an_event_that_never_counted_is_not_estimated() {
        let mut estimate = Estimate { base: 0, past: 0, open: None };
        estimate.starved_at(ScheduledOut { count: 0, enabled: 0, running: 0 }, 1_000_000);
        assert_eq!(estimate.missed(), 0);
    }

    #[test]
    fn an_estimate_never_shrinks() {
        let mut estimate = Estimate { base: 0, past: 0, open: None };
        let state = ScheduledOut { count: 10, enabled: 10, running: 10 };
        estimate.starved_at(state, 50);
        estimate.scheduled_at(45, 50);
        assert_eq!(estimate.missed(), 40);
    }
}
