//! What the bank keeps of a counter.

use std::time::Duration;

use super::starvation::Starvation;
use crate::event::Selection;

/// One counter.
#[derive(Default)]
pub struct Counter {
    /// What it showed when it was last looked at.
    pub value: u64,
    pub selection: Option<Selection>,
    /// Its share in what counts for it, if anything does.
    pub share: Option<Share>,
    /// What the host refused when it was last asked, and why: that is told once.
    pub refused: Option<(Selection, String)>,
    pub overflows: u64,
    /// How much of what it shows is an estimate.
    pub estimated: u64,
    /// Whether it has overflowed too soon after the last time, and nobody is to know yet.
    pub put_off: bool,
    pub starvation: Starvation,
}

impl Counter {
    /// Software writes a value, of so many bits.
    pub fn set(&mut self, value: u64, mask: u64) {
        (self.value, self.put_off, self.estimated) = (value, false, 0);
        self.find_overflow(mask);
    }

    /// Takes over what its backing has counted while it ran; whether it has overflowed.
    pub fn advance(&mut self, count: u64, estimated: u64, mask: u64) -> bool {
        let Some(share) = &mut self.share else { return false };
        let overflows = count >= share.overflow;
        // From all ones on it goes on at zero.
        self.value = self.value.wrapping_add(count.saturating_sub(share.mark)) & mask;
        self.estimated = self.estimated.saturating_add(estimated.saturating_sub(share.mark_estimated));
        (share.mark, share.mark_estimated) = (count, estimated);
        if overflows {
            self.find_overflow(mask);
        }
        overflows
    }

    /// Takes over nothing of what its backing has counted until now.
    pub fn skip(&mut self, count: u64, estimated: u64, mask: u64) {
        if let Some(share) = &mut self.share {
            (share.mark, share.mark_estimated) = (count, estimated);
        }
        self.find_overflow(mask);
    }

    /// From 0 it never overflows if it has 64 bits.
    fn find_overflow(&mut self, mask: u64) {
        if let Some(share) = &mut self.share {
            share.overflow = share.mark.saturating_add((mask - self.value).saturating_add(1));
        }
    }
}

/// What of a backing's count is a counter's.
pub struct Share {
    /// The backing's count when the counter was last looked at while it ran.
    pub mark: u64,
    /// How much of that was an estimate.
    pub mark_estimated: u64,
    /// The backing's count at which the counter overflows, if it runs until then. To go on does not change that.
    pub overflow: u64,
    /// The count at which the counter's last alarm came.
    pub last_alarm: u64,
    /// The count before which no overflow may interrupt.
    pub earliest: u64,
    /// Since when the counter has it.
    pub since: Duration,
    /// How long the counter had been without hardware until then, in all.
    pub starved_before: Duration,
}
