//! Whether the bank's counters have hardware of the host's, which others may take: what is found out about that, and who hears
//! of it.

use std::time::Duration;

use super::Bank;
use super::starvation::Change;
use crate::event::Selection;
use crate::journal::Entry;
use crate::mask::members;
use crate::notice::Notice;
use crate::source::{Backing, Count, Source};

/// What was found behind counters.
pub struct Look {
    /// What was counted.
    pub count: u64,
    /// Whether one of them was without hardware, and has some again.
    pub recovered: bool,
}

impl<S: Source> Bank<S> {
    /// Whether a counter that runs is without hardware, as far as was found out.
    pub fn is_starved(&self) -> bool {
        self.starved & self.running != 0
    }

    /// The vCPU stands still from now on, and so its counters miss nothing.
    pub fn stands_still(&mut self) {
        self.stand_still(self.running);
    }

    /// These counters do.
    pub(super) fn stand_still(&mut self, counters: u64) {
        for counter in members(counters & self.starved) {
            self.counters[counter].starvation.stands_still(|| self.source.now());
        }
    }

    /// Whether all counters that run and were found without hardware have some again. It asks for that, too.
    pub fn has_hardware_again(&mut self) -> bool {
        let starved = self.starved & self.running;
        let backings = self.backings.iter_mut().filter(|backed| backed.users & starved != 0);
        // Each is asked.
        backings
            .map(|backed| matches!(backed.backing.count(), Count::Exact(_)))
            .fold(true, |all, has| all & has)
    }

    /// Whether a counter has lost its hardware, or got it back, since that was last forgotten.
    pub fn hardware_changed(&self) -> bool {
        self.hardware_changed
    }

    /// Forgets that.
    pub fn forget_hardware_changed(&mut self) {
        self.hardware_changed = false;
    }

    /// What a backing has counted; the operator is told of the starvation of its counters.
    pub(super) fn count(&mut self, index: usize) -> Look {
        let backed = &mut self.backings[index];
        if let Some(deferred) = backed.deferred {
            return Look { count: deferred.count, recovered: false };
        }
        let (users, count) = (backed.users, backed.backing.count());
        match count {
            Count::Exact(count) => {
                let starved = users & self.starved;
                members(starved).for_each(|counter| self.recovers(counter));
                Look { count, recovered: starved != 0 }
            }
            Count::Starved(count) => {
                let last_alarm = backed.last_alarm;
                // One that stands still misses nothing.
                members(users & self.running).for_each(|counter| self.starves(counter, last_alarm));
                Look { count, recovered: false }
            }
        }
    }

    fn starves(&mut self, counter: usize, last_alarm: Duration) {
        let this = &mut self.counters[counter];
        let (Some(selection), Some(share)) = (this.selection, &this.share) else { return };
        let known = if this.starvation.is_open() {
            self.source.now()
        } else {
            self.last_poll.max(share.since).max(last_alarm)
        };
        if this.starvation.starved(|| known) == Change::Began {
            self.statistics.starvations += 1;
            self.starved |= 1 << counter;
            self.hardware_changed = true;
            let is_told = self.tell(Notice::Starved { counter, selection });
            self.counters[counter].starvation.set_reported(is_told);
        }
    }

    fn recovers(&mut self, counter: usize) {
        self.gap_is_over(counter, |selection, missed| Notice::Recovered { counter, selection, missed });
    }

    /// A counter has nothing any more that could be without hardware.
    pub(super) fn needs_no_hardware(&mut self, counter: usize) {
        self.gap_is_over(counter, |selection, missed| Notice::GivenUp { counter, selection, missed });
    }

    fn gap_is_over(&mut self, counter: usize, notice: impl FnOnce(Selection, Duration) -> Notice) {
        let this = &mut self.counters[counter];
        let Change::Ended { missed, is_reported } = this.starvation.over(|| self.source.now()) else {
            return;
        };
        self.starved &= !(1 << counter);
        self.hardware_changed = true;
        let Some(selection) = this.selection else { return };
        let notice = notice(selection, missed);
        if is_reported {
            self.tell(notice);
        } else {
            self.journal.add(|| Entry::Noticed(notice));
        }
    }
}
