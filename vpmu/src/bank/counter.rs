//! A counter: its value, and its share in a host event.

use std::time::Duration;

use super::starvation::Starvation;
use crate::event::Selection;

/// One counter.
#[derive(Default)]
pub struct Counter {
    /// Value as of its last update.
    pub value: u64,
    pub selection: Option<Selection>,
    /// Its share in a host event, if it has one.
    pub share: Option<Share>,
    /// What the host last refused for this counter, and why.
    pub refused: Option<(Selection, String)>,
    pub overflows: u64,
    /// How much of the value is an estimate.
    pub estimated: u64,
    /// It has overflowed too soon after the last overflow, and this overflow is not reported yet.
    pub overflow_delayed: bool,
    pub starvation: Starvation,
    pub rate: Rate,
    /// The value and the rate before the guest's writes since the counter last counted. It may write several times, and
    /// on the shared page only its last write is seen.
    before_writes: Option<(u64, Rate)>,
    /// Number of counts from an overflow to the next, if the counter sets itself. 0 if it does not.
    pub reload: u64,
    /// Overflows of a counter that sets itself, since they were last taken.
    pub reloads: u64,
}

/// What the guest's writes tell of how it samples.
#[derive(Debug, Default, Clone, Copy)]
pub struct Rate {
    /// Number of counts from one overflow to the next, as the guest last set it.
    pub period: u64,
    /// How much the periods vary: more with each that differs from the one before, less with each that does not.
    variation: u8,
}

/// Least and greatest `variation` of a counter that samples at a rate.
const AT_A_RATE: std::ops::RangeInclusive<u8> = 4..=8;
/// What a period adds that differs.
const DIFFERS: u8 = 2;

impl Rate {
    /// Returns the rate after a period was set.
    fn with(self, period: u64) -> Self {
        let variation = if self.period == period {
            self.variation.saturating_sub(1)
        } else {
            (self.variation + DIFFERS).min(*AT_A_RATE.end())
        };
        Self { period, variation }
    }
}

impl Counter {
    /// Sets the value.
    pub fn set(&mut self, value: u64, mask: u64) {
        let (counted, rate) = *self.before_writes.get_or_insert((self.value, self.rate));
        // After an overflow, a kernel takes the period from the value.
        let sets_period = counted <= mask / 2 && value > mask / 2;
        self.rate = if sets_period { rate.with(counted.wrapping_sub(value) & mask) } else { rate };
        (self.value, self.overflow_delayed, self.estimated) = (value, false, 0);
        self.find_overflow(mask);
    }

    /// Returns whether the guest samples at a rate, so that the periods vary.
    pub fn is_at_a_rate(&self) -> bool {
        AT_A_RATE.contains(&self.rate.variation)
    }

    /// Adds what its host event has counted since the last update. Returns whether the counter has overflowed.
    pub fn advance(&mut self, count: u64, estimated: u64, mask: u64) -> bool {
        let Some(share) = &mut self.share else { return false };
        if count < share.mark {
            // It is ahead.
            return false;
        }
        if count > share.mark {
            self.before_writes = None;
        }
        let overflows = count >= share.overflow;
        self.value = self.value.wrapping_add(count.saturating_sub(share.mark)) & mask;
        self.estimated = self.estimated.saturating_add(estimated.saturating_sub(share.mark_estimated));
        (share.mark, share.mark_estimated) = (count, estimated);
        if overflows {
            if let Some(more) = self.value.checked_div(self.reload) {
                self.reloads = self.reloads.saturating_add(1 + more);
                self.value = (self.value % self.reload).wrapping_sub(self.reload) & mask;
            }
            self.find_overflow(mask);
        }
        overflows
    }

    /// Skips what its host event has counted since the last update.
    pub fn skip(&mut self, count: u64, estimated: u64, mask: u64) {
        if let Some(share) = &mut self.share {
            // A running counter may be ahead.
            let behind = count.saturating_add(std::mem::take(&mut share.ahead));
            (share.mark, share.mark_estimated) = (share.mark.max(behind), estimated);
        }
        self.find_overflow(mask);
    }

    /// Skips so many counts.
    pub fn passes_over(&mut self, counts: u64, mask: u64) {
        if let Some(share) = &mut self.share {
            share.mark = share.mark.saturating_add(counts);
        }
        self.find_overflow(mask);
    }

    /// Finds the host event's count at which the counter overflows. A counter of 64 bits never overflows from 0.
    fn find_overflow(&mut self, mask: u64) {
        if let Some(share) = &mut self.share {
            share.overflow = share.mark.saturating_add((mask - self.value).saturating_add(1));
        }
    }
}

/// A counter's share in a host event: which of the event's counts are the counter's.
pub struct Share {
    /// Count of the host event at the counter's last update.
    pub mark: u64,
    /// By how much the counter was ahead when it was stopped: it skips as many counts when it starts.
    pub ahead: u64,
    /// How much of that count is an estimate.
    pub mark_estimated: u64,
    /// Count of the host event at which the counter overflows, if it runs until then.
    pub overflow: u64,
    /// Count at which the counter's last alarm expired.
    pub last_alarm: u64,
    /// Count before which no overflow may interrupt.
    pub earliest: u64,
    /// Time since which the counter has the share.
    pub since: Duration,
    /// How long the counter had been without hardware until then, in total.
    pub starved_before: Duration,
}

impl Share {
    /// Records that the counter is stopped at this count of the host event, after it was updated.
    pub fn stop(&mut self, count: u64) {
        self.ahead = self.mark.saturating_sub(count);
        self.mark = self.mark.min(count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MASK: u64 = u64::MAX >> 16;

    /// A counter whose share counts from 0.
    fn counter() -> Counter {
        let share = Share {
            mark: 0,
            ahead: 0,
            mark_estimated: 0,
            overflow: u64::MAX,
            last_alarm: 0,
            earliest: 0,
            since: Duration::ZERO,
            starved_before: Duration::ZERO,
        };
        Counter { share: Some(share), ..Counter::default() }
    }

    #[test]
    fn the_last_write_of_a_handler_sets_the_period() {
        let mut counter = counter();
        let mut count = 0;
        for (writes, period) in [(vec![100], 100), (vec![200, 300], 300), (vec![100, 0, 250], 250)] {
            for distance in writes {
                counter.set((MASK + 1).wrapping_sub(distance) & MASK, MASK);
            }
            assert_eq!(counter.rate.period, period);
            count += period;
            assert!(counter.advance(count, 0, MASK));
        }
        assert!(counter.is_at_a_rate(), "each of the three periods was another");
        counter.set(MASK - 249, MASK);
        let variation = counter.rate.variation;
        counter.set(MASK - 249, MASK);
        assert_eq!(counter.rate.variation, variation, "written again, before anything was counted");
    }

    #[test]
    fn a_counter_that_has_not_overflowed_sets_no_period() {
        let mut counter = counter();
        counter.set(MASK - 99, MASK);
        assert!(!counter.advance(50, 0, MASK));
        counter.set(0, MASK);
        counter.set(MASK - 199, MASK);
        assert_eq!(counter.rate.period, 100);
    }
}
