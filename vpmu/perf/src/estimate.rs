//! What an event has probably missed while it was without hardware: as much in that time as it counted, on average, in the time
//! that it had some. Time is the thread's own; an event's clock is the same, but stops while the event is without hardware.

use std::mem::zeroed;

use crate::page::Left;

/// An event's.
pub struct Estimate {
    /// The thread's time when the event's clock was at 0, or would have been if that had not stopped.
    base: u64,
    /// What was missed in gaps that are over.
    past: u64,
    open: Option<Gap>,
}

/// A gap that is not over.
struct Gap {
    left: Left,
    missed: u64,
}

impl Estimate {
    /// That of an event that was just opened.
    pub fn new() -> Self {
        Self { base: thread_time(), past: 0, open: None }
    }

    /// The event has no hardware, and had counted so much when it lost that.
    pub fn starved(&mut self, left: Left) {
        self.starved_at(left, thread_time());
    }

    /// The event counts, and has been enabled for so long by its clock.
    pub fn counts(&mut self, enabled: impl FnOnce() -> Option<u64>) {
        if self.open.is_some()
            && let Some(enabled) = enabled()
        {
            self.counts_at(enabled, thread_time());
        }
    }

    /// What was missed so far.
    pub fn missed(&self) -> u64 {
        self.past.saturating_add(self.open.as_ref().map_or(0, |gap| gap.missed))
    }

    fn starved_at(&mut self, left: Left, now: u64) {
        let length = now.saturating_sub(self.base).saturating_sub(left.enabled);
        let before = self.open.as_ref().map_or(0, |gap| gap.missed);
        self.open = Some(Gap { left, missed: missed(left, length).max(before) });
    }

    fn counts_at(&mut self, enabled: u64, now: u64) {
        let Some(Gap { left, missed: before }) = self.open.take() else { return };
        let base = now.saturating_sub(enabled);
        let length = base.saturating_sub(self.base);
        self.past = self.past.saturating_add(missed(left, length).max(before));
        self.base = base;
    }
}

/// What is missed in so much time.
fn missed(left: Left, time: u64) -> u64 {
    let missed = u128::from(left.count) * u128::from(time) / u128::from(left.running.max(1));
    // What never had hardware has nothing to tell its rate by.
    if left.running == 0 { 0 } else { u64::try_from(missed).unwrap_or(u64::MAX) }
}

/// For how long this thread has run, in nanoseconds.
fn thread_time() -> u64 {
    // SAFETY: all-zero is a valid `timespec`.
    let mut time: libc::timespec = unsafe { zeroed() };
    // SAFETY: `time` is a valid place for the answer.
    if unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) } < 0 {
        return 0;
    }
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_is_filled_at_the_rate_before_it() {
        let mut estimate = Estimate { base: 1000, past: 0, open: None };
        let left = Left { count: 900, enabled: 300, running: 300 };
        estimate.starved_at(left, 1400);
        assert_eq!(estimate.missed(), 300, "100 ns at 3 a nanosecond");
        estimate.starved_at(left, 1450);
        assert_eq!(estimate.missed(), 450);
        estimate.counts_at(310, 1500);
        assert_eq!(estimate.missed(), 570, "its clock says 310 after 500 ns: 190 were missed");
        let left = Left { count: 1200, enabled: 400, running: 400 };
        estimate.starved_at(left, 1600);
        assert_eq!(estimate.missed(), 570 + 30, "the next gap has been for 10 ns");
    }

    #[test]
    fn what_never_counted_is_not_estimated() {
        let mut estimate = Estimate { base: 0, past: 0, open: None };
        estimate.starved_at(Left { count: 0, enabled: 0, running: 0 }, 1_000_000);
        assert_eq!(estimate.missed(), 0);
    }

    #[test]
    fn an_estimate_never_shrinks() {
        let mut estimate = Estimate { base: 0, past: 0, open: None };
        let left = Left { count: 10, enabled: 10, running: 10 };
        estimate.starved_at(left, 50);
        estimate.counts_at(45, 50);
        assert_eq!(estimate.missed(), 40);
    }
}
