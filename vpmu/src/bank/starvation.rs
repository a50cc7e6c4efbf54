//! Starvation intervals: when a counter had no hardware. The host does not say when others take a counter or give it
//! back; it is found out when the counter is looked at. So an interval's length is the longest that it can have been.

use std::time::Duration;

/// The starvation intervals of one counter.
#[derive(Debug, Default)]
pub struct Starvation {
    open: Option<Interval>,
    times: u64,
    /// Total length of the closed intervals.
    past: Duration,
}

/// An interval that is not over.
#[derive(Debug)]
struct Interval {
    /// Length up to the last time that the counter stood still; a counter that stands still misses nothing.
    before: Duration,
    /// Start of the current part; `None` while the counter stands still.
    since: Option<Duration>,
    /// The operator was told of the beginning, and is to be told of the end.
    is_reported: bool,
}

/// What changed since the last reading.
#[derive(Debug, PartialEq, Eq)]
pub enum Change {
    /// Nothing new.
    None,
    /// An interval has begun.
    Began,
    /// An interval has ended.
    Ended {
        /// Its length at most.
        missed: Duration,
        /// The operator was told of its beginning.
        is_reported: bool,
    },
}

impl Starvation {
    /// Records that a running counter has no hardware. `known` returns when it was last known to have some, or began to
    /// run.
    pub fn starved(&mut self, known: impl FnOnce() -> Duration) -> Change {
        if let Some(interval) = &mut self.open {
            interval.since.get_or_insert_with(known);
            return Change::None;
        }
        self.open = Some(Interval { before: Duration::ZERO, since: Some(known()), is_reported: false });
        self.times += 1;
        Change::Began
    }

    /// Records that the counter has hardware, or needs none any more.
    pub fn over(&mut self, now: impl FnOnce() -> Duration) -> Change {
        let Some(interval) = self.open.take() else { return Change::None };
        let missed = interval.length(now);
        self.past += missed;
        Change::Ended { missed, is_reported: interval.is_reported }
    }

    /// Records that the counter has stopped.
    pub fn counter_stopped(&mut self, now: impl FnOnce() -> Duration) {
        if let Some(interval) = &mut self.open {
            interval.before = interval.length(now);
            interval.since = None;
        }
    }

    /// Sets whether the operator was told of the beginning of the open interval.
    pub fn set_reported(&mut self, is_reported: bool) {
        if let Some(interval) = &mut self.open {
            interval.is_reported = is_reported;
        }
    }

    /// Returns true while the counter is starved.
    pub fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Number of intervals.
    pub fn times(&self) -> u64 {
        self.times
    }

    /// Total length, up to now.
    pub fn total(&self, now: Duration) -> Duration {
        self.past + self.open.as_ref().map_or(Duration::ZERO, |interval| interval.length(|| now))
    }
}

impl Interval {
    fn length(&self, now: impl FnOnce() -> Duration) -> Duration {
        self.before + self.since.map_or(Duration::ZERO, |since| now().saturating_sub(since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn an_interval_is_as_long_as_it_can_have_been() {
        let mut starvation = Starvation::default();
        assert_eq!(starvation.starved(|| at(3)), Change::Began);
        starvation.set_reported(true);
        assert_eq!(starvation.starved(|| at(4)), Change::None);
        assert_eq!(starvation.total(at(5)), at(2));
        assert_eq!(starvation.over(|| at(6)), Change::Ended { missed: at(3), is_reported: true });
        assert_eq!(starvation.over(|| at(7)), Change::None);
        assert_eq!((starvation.times(), starvation.total(at(9))), (1, at(3)));
    }

    #[test]
    fn a_counter_that_stands_still_misses_nothing() {
        let mut starvation = Starvation::default();
        starvation.starved(|| at(1));
        starvation.counter_stopped(|| at(2));
        starvation.counter_stopped(|| at(50));
        assert_eq!(starvation.starved(|| at(90)), Change::None);
        assert_eq!(starvation.over(|| at(91)), Change::Ended { missed: at(2), is_reported: false });
    }
}
