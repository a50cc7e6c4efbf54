//! Tracks which counters have lost their hardware, and reports it.

use std::time::Duration;

use super::Bank;
use super::starvation::Change;
use crate::event::Selection;
use crate::journal::Entry;
use crate::mask::members;
use crate::notice::{Holder, Holders, Notice};
use crate::source::{Backing, Count, Place, Source};

/// What is known of the counters' hardware.
#[derive(Debug, Default)]
pub struct Hardware {
    /// Counters that were found without hardware. Checked at every exit.
    starved: u64,
    /// A counter has lost its hardware or got it back since this was last cleared.
    changed: bool,
    /// Time of the last poll.
    pub last_poll: Duration,
}

impl Hardware {
    /// Returns the mask of the counters that were found without hardware.
    pub fn starved(&self) -> u64 {
        self.starved
    }

    /// Returns whether counters have lost their hardware or got it back since that was last cleared.
    pub fn changed(&self) -> bool {
        self.changed
    }

    /// Sets what [`Self::changed`] returns.
    pub fn set_changed(&mut self, changed: bool) {
        self.changed = changed;
    }
}

/// A reading of a host event.
pub struct Reading {
    /// What the event has counted.
    pub count: u64,
    /// One of its counters was without hardware, and has some again.
    pub recovered: bool,
}

impl<S: Source> Bank<S> {
    /// Returns whether a running counter has no hardware, as far as is known.
    pub fn is_starved(&self) -> bool {
        self.starved() != 0
    }

    /// Returns the running counters that have no hardware, as far as is known.
    pub fn starved(&self) -> u64 {
        self.hardware.starved & self.running
    }

    /// Records that the VM is paused: the counters miss nothing.
    pub fn vm_paused(&mut self) {
        self.counters_stopped(self.running);
    }

    /// Records that these counters have stopped.
    pub(super) fn counters_stopped(&mut self, counters: u64) {
        for counter in members(counters & self.hardware.starved) {
            self.counters[counter].starvation.counter_stopped(|| self.source.now());
        }
    }

    /// Retries scheduling. Returns true once every running counter is on hardware.
    pub fn retry_scheduling(&mut self) -> bool {
        let starved = self.hardware.starved & self.running;
        let events = self.events.iter_mut().filter(|event| event.users & starved != 0);
        // Every event is read, because that retries its scheduling.
        events.map(|event| matches!(event.backing.count(), Count::Exact(_))).fold(true, |all, has| all & has)
    }

    /// Reads what a host event has counted, and tells the operator of the starvation of its counters.
    pub(super) fn count(&mut self, index: usize) -> Reading {
        let event = &mut self.events[index];
        if let Some(deferred) = event.deferred {
            return Reading { count: deferred.count, recovered: false };
        }
        let (users, last_alarm) = (event.users, event.load.last_alarm());
        match event.count() {
            Count::Exact(count) => {
                let starved = users & self.hardware.starved;
                members(starved).for_each(|counter| self.recovers(counter));
                Reading { count, recovered: starved != 0 }
            }
            Count::Starved(count) => {
                // A counter that stands still misses nothing.
                members(users & self.running).for_each(|counter| self.starves(counter, last_alarm));
                Reading { count, recovered: false }
            }
        }
    }

    fn starves(&mut self, counter: usize, last_alarm: Duration) {
        let this = &mut self.counters[counter];
        let (Some(selection), Some(share)) = (this.selection, &this.share) else { return };
        let known = if this.starvation.is_open() {
            self.source.now()
        } else {
            self.hardware.last_poll.max(share.since).max(last_alarm)
        };
        if this.starvation.starved(|| known) == Change::Began {
            self.record.statistics.starvations += 1;
            self.hardware.starved |= 1 << counter;
            self.hardware.changed = true;
            let holders = self.holders();
            let is_reported = self.add_notice(Notice::Starved { counter, selection, holders });
            self.counters[counter].starvation.set_reported(is_reported);
        }
    }

    /// Returns who holds the hardware.
    fn holders(&self) -> Holders {
        let (running, starved) = (self.running, self.hardware.starved);
        let events = self.events.iter().filter(|event| event.users & starved == 0);
        let own = events.filter_map(|event| {
            let hardware = match event.backing.place() {
                Place::Counter(number) => Some(number),
                Place::Unknown => None,
                Place::Nowhere => return None,
            };
            let (takes, stands_still) = (event.hardware, event.users & running == 0);
            Some(Holder { selection: event.selection, hardware, takes, stands_still })
        });
        let mut own: Vec<_> = own.collect();
        own.sort_by_key(|holder| holder.hardware);
        Holders { counters: self.guests, own }
    }

    fn recovers(&mut self, counter: usize) {
        self.end_starvation(counter, |selection, missed| Notice::Recovered { counter, selection, missed });
    }

    /// Records that a counter has no host event any more that could be without hardware.
    pub(super) fn needs_no_hardware(&mut self, counter: usize) {
        self.end_starvation(counter, |selection, missed| Notice::GivenUp { counter, selection, missed });
    }

    fn end_starvation(&mut self, counter: usize, notice: impl FnOnce(Selection, Duration) -> Notice) {
        let this = &mut self.counters[counter];
        let Change::Ended { missed, is_reported } = this.starvation.over(|| self.source.now()) else {
            return;
        };
        self.hardware.starved &= !(1 << counter);
        self.hardware.changed = true;
        let Some(selection) = this.selection else { return };
        let notice = notice(selection, missed);
        if is_reported {
            self.add_notice(notice);
        } else {
            self.record.journal.add(|| Entry::Noticed(notice));
        }
    }
}
