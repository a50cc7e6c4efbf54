//! When a counter was without hardware. Nobody says when others take it, or give it back: that is found out when somebody looks,
//! so a gap's length is the most that it can have been.

use std::time::Duration;

/// The gaps of one counter.
#[derive(Debug, Default)]
pub struct Gaps {
    open: Option<Gap>,
    times: u64,
    /// The length of those that are over.
    past: Duration,
}

/// One that is not over.
#[derive(Debug)]
struct Gap {
    /// Its length before the counter last stood still: one that does misses nothing.
    before: Duration,
    /// Since when it misses counts again, unless it stands still.
    since: Option<Duration>,
    /// Whether somebody was told that it began, and is waiting for its end.
    told: bool,
}

/// What a look has found out.
#[derive(Debug, PartialEq, Eq)]
pub enum Change {
    /// Nothing new.
    None,
    /// A gap has begun.
    Began,
    /// It is over, after at most so long.
    Ended {
        /// How long.
        missed: Duration,
        /// Whether its beginning was told.
        told: bool,
    },
}

impl Gaps {
    /// A counter that runs was found without hardware, and was known to have some at `known`, or begun to run then.
    pub fn starved(&mut self, known: impl FnOnce() -> Duration) -> Change {
        if let Some(gap) = &mut self.open {
            gap.since.get_or_insert_with(known);
            return Change::None;
        }
        self.open = Some(Gap { before: Duration::ZERO, since: Some(known()), told: false });
        self.times += 1;
        Change::Began
    }

    /// It has hardware, or does not need any more.
    pub fn over(&mut self, now: impl FnOnce() -> Duration) -> Change {
        let Some(gap) = self.open.take() else { return Change::None };
        let missed = gap.length(now);
        self.past += missed;
        Change::Ended { missed, told: gap.told }
    }

    /// It stands still from now on.
    pub fn stands_still(&mut self, now: impl FnOnce() -> Duration) {
        if let Some(gap) = &mut self.open {
            gap.before = gap.length(now);
            gap.since = None;
        }
    }

    /// Whether the beginning of the open one was told.
    pub fn set_told(&mut self, told: bool) {
        if let Some(gap) = &mut self.open {
            gap.told = told;
        }
    }

    /// Whether one is open.
    pub fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// How many there were.
    pub fn times(&self) -> u64 {
        self.times
    }

    /// Their length, up to now.
    pub fn total(&self, now: Duration) -> Duration {
        self.past + self.open.as_ref().map_or(Duration::ZERO, |gap| gap.length(|| now))
    }
}

impl Gap {
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
    fn a_gap_is_as_long_as_it_can_have_been() {
        let mut gaps = Gaps::default();
        assert_eq!(gaps.starved(|| at(3)), Change::Began);
        gaps.set_told(true);
        assert_eq!(gaps.starved(|| at(4)), Change::None);
        assert_eq!(gaps.total(at(5)), at(2));
        assert_eq!(gaps.over(|| at(6)), Change::Ended { missed: at(3), told: true });
        assert_eq!(gaps.over(|| at(7)), Change::None);
        assert_eq!((gaps.times(), gaps.total(at(9))), (1, at(3)));
    }

    #[test]
    fn a_counter_that_stands_still_misses_nothing() {
        let mut gaps = Gaps::default();
        gaps.starved(|| at(1));
        gaps.stands_still(|| at(2));
        gaps.stands_still(|| at(50));
        assert_eq!(gaps.starved(|| at(90)), Change::None);
        assert_eq!(gaps.over(|| at(91)), Change::Ended { missed: at(2), told: false });
    }
}
