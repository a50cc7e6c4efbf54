//! A vCPU's counters: their values, which of them run, and which have overflowed.
//!
//! The event that backs a counter is shared by all counters that select the same, lives as long as one of them does, and never
//! stops: a counter that stands still does not add what its backing counts meanwhile. So stopping, starting and reading a
//! counter cost the host no more than a read of the count. Only an alarm, for the next overflow, is a request to the host. It is
//! made as seldom as possible: an alarm that expires early does no harm, because an overflow is computed from the value.

mod alarms;
mod backings;
mod counter;
mod deferral;
mod floor;
mod hardware;
mod report;
mod starvation;
#[cfg(test)]
mod tests;

use std::time::Duration;

use log::debug;

use crate::event::{Event, Selection};
use crate::journal::{Entry, Journal};
use crate::mask::{first, members};
use crate::notice::{Notice, Notices};
use crate::policy::Policy;
use crate::report::Statistics;
use crate::source::{Backing, FAR, PolicyEffect, Source};
use backings::Backed;
use counter::Counter;
use floor::Floor;
use hardware::Look;

/// Whether an overflow needs an alarm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Alarm {
    /// It does: the guest wants an interrupt.
    AtOverflow,
    /// It does not: the overflow is found at the next update.
    Off,
}

/// The counters, numbered from 0. Sets of counters are masks.
pub struct Bank<S: Source> {
    source: S,
    width: u32,
    counters: Vec<Counter>,
    /// The backing events, each for all counters that select the same.
    backings: Vec<Backed<S::Backing>>,
    running: u64,
    /// Counters with [`Alarm::AtOverflow`].
    interrupting: u64,
    overflowed: u64,
    /// Counters that have stood still since the last call of [`Self::release_idle`].
    idle: u64,
    floor: Floor,
    /// The guest is predicted to stop all counters first when it is interrupted.
    expects_stop: bool,
    /// An alarm waits for that stop.
    awaits_stop: bool,
    /// The policy's least distance between two overflows that interrupt.
    least_period: u64,
    /// Time of the last poll.
    last_poll: Duration,
    /// Counters that were found without hardware. Checked at every exit.
    starved: u64,
    /// A counter has lost its hardware or got it back since this was last cleared.
    hardware_changed: bool,
    notices: Notices,
    journal: Journal,
    statistics: Statistics,
    /// Number of overflows when the last alarm was handled.
    overflows_at_alarm: u64,
}

impl<S: Source> Bank<S> {
    /// Creates `counters` counters of `width` bits: all zero, without an event, standing still.
    ///
    /// # Panics
    /// If there are none or more than 63 counters, or their bits are none or more than 64.
    pub fn new(source: S, counters: usize, width: u32) -> Self {
        assert!((1..64).contains(&counters) && (1..=64).contains(&width));
        Self {
            source,
            width,
            counters: (0..counters).map(|_| Counter::default()).collect(),
            backings: Vec::with_capacity(counters),
            running: 0,
            interrupting: 0,
            overflowed: 0,
            idle: 0,
            floor: Floor::default(),
            expects_stop: false,
            awaits_stop: false,
            least_period: 1,
            last_poll: Duration::ZERO,
            starved: 0,
            hardware_changed: false,
            notices: Notices::default(),
            journal: Journal::default(),
            statistics: Statistics::default(),
            overflows_at_alarm: 0,
        }
    }

    /// The mask of all counters.
    pub fn all(&self) -> u64 {
        first(self.counters.len())
    }

    /// Number of counters.
    pub fn size(&self) -> usize {
        self.counters.len()
    }

    /// Sets the event of a counter, which keeps its value.
    pub fn configure(&mut self, counter: usize, selection: Option<Selection>, alarm: Alarm) {
        let interrupts = alarm == Alarm::AtOverflow;
        let before = (self.counters[counter].selection, self.interrupts(counter));
        self.look_if_running(counter);
        if before != (selection, interrupts) {
            self.counters[counter].put_off = false;
        }
        self.reconfigure(counter, selection, interrupts);
    }

    /// Replaces the backing event without the guest seeing it. An overflow that was put off is still reported.
    pub fn select(&mut self, counter: usize, selection: Option<Selection>) {
        if self.counters[counter].selection != selection {
            self.look_if_running(counter);
            self.reconfigure(counter, selection, self.interrupts(counter));
        }
    }

    /// Sets which counters run; all others stand still.
    pub fn run(&mut self, running: u64) {
        self.awaits_stop &= running != 0;
        let (stop, start) = (self.running & !running, running & !self.running);
        if stop != 0 {
            self.look_at(stop);
            self.stand_still(stop);
        }
        self.running = running;
        if start != 0 {
            self.resume(start);
        }
    }

    /// Updates and reads a counter.
    pub fn read(&mut self, counter: usize) -> u64 {
        self.look_if_running(counter);
        self.counters[counter].value
    }

    /// Returns a counter's value as of its last update.
    pub fn value(&self, counter: usize) -> u64 {
        self.counters[counter].value
    }

    /// Writes a counter; bits beyond its width are dropped.
    pub fn write(&mut self, counter: usize, value: u64) {
        let mask = self.mask();
        let value = value & mask;
        // The alarm of a counter that stands still is set when it starts.
        let index = if self.runs(counter) { self.backing_of(counter) } else { None };
        if let Some(deferred) = index.and_then(|index| self.backings[index].deferred.as_mut()) {
            deferred.written = true;
            self.counters[counter].set(value, mask);
            return;
        }
        self.look_if_running(counter);
        self.counters[counter].set(value, mask);
        if let (Some(index), Some(share)) = (index, &self.counters[counter].share) {
            self.set_alarm(index, share.mark);
        }
    }

    /// Updates the running counters.
    pub fn look(&mut self) {
        self.look_at(self.running);
    }

    /// Updates all counters and looks for expired alarms. An alarm also expires while its counters stand still.
    pub fn look_at_all(&mut self) {
        self.look_at(self.all());
    }

    /// Polls for counters that have lost their hardware or got it back.
    pub fn poll(&mut self) {
        self.look_at_all();
        self.last_poll = self.source.now();
    }

    /// Releases the backings of counters that have stood still since the last call.
    pub fn release_idle(&mut self) {
        let stand_still = self.backed() & !self.running;
        for counter in members(stand_still & self.idle) {
            debug!("counter {counter} stands still: its hardware is given back");
            self.release(counter);
        }
        self.idle = stand_still;
    }

    /// Returns whether the host has this event.
    pub fn can_count(&mut self, event: Event) -> bool {
        self.source.can_count(event)
    }

    /// Monotonic time.
    pub fn now(&self) -> Duration {
        self.source.now()
    }

    /// Sets the policy.
    pub fn set_policy(&mut self, policy: &Policy) {
        self.look_at_all();
        self.least_period = policy.least_period.get().min(FAR);
        if self.source.set_policy(policy) == PolicyEffect::OnNewBackings {
            members(self.backed()).for_each(|counter| self.release(counter));
            self.resume(self.running);
        }
    }

    /// Sets whether the guest is predicted to stop all counters first when it is interrupted.
    pub fn expect_stop(&mut self, expected: bool) {
        self.expects_stop = expected;
    }

    /// Sets the alarms that wait for a stop, because the guest was not interrupted or does something else first.
    pub fn wait_no_longer(&mut self) {
        if !std::mem::take(&mut self.awaits_stop) {
            return;
        }
        for index in 0..self.backings.len() {
            // The alarm of a deferred backing is set by `commit`.
            if self.backings[index].deferred.is_some() {
                continue;
            }
            let look = self.count(index);
            if look.recovered {
                self.set_alarm_anew(index, look.count);
            } else {
                self.set_alarm(index, look.count);
            }
        }
    }

    /// Counts an expired alarm, after the counters were updated.
    pub fn alarm(&mut self) {
        self.statistics.alarms += 1;
        let overflows = self.overflows();
        // Its overflow may have been found before, on the way here.
        if std::mem::replace(&mut self.overflows_at_alarm, overflows) == overflows {
            self.statistics.ignored_alarms += 1;
        }
    }

    /// Takes the counters that have overflowed, as of their last updates.
    pub fn take_overflowed(&mut self) -> u64 {
        std::mem::take(&mut self.overflowed)
    }

    /// Takes the notices for the operator.
    pub fn take_notices(&mut self) -> Vec<Notice> {
        self.notices.take()
    }

    /// The journal.
    pub fn journal(&mut self) -> &mut Journal {
        &mut self.journal
    }

    fn mask(&self) -> u64 {
        u64::MAX >> (u64::BITS - self.width)
    }

    /// Adds a notice for the operator. Returns false if it was dropped because there were too many of late.
    pub fn tell(&mut self, notice: Notice) -> bool {
        self.journal.add(|| Entry::Noticed(notice.clone()));
        self.notices.tell(notice, self.source.now())
    }

    fn reconfigure(&mut self, counter: usize, selection: Option<Selection>, interrupts: bool) {
        if (self.counters[counter].selection, self.interrupts(counter)) != (selection, interrupts) {
            self.journal.add(|| Entry::Configured { counter, selection, interrupts });
        }
        self.interrupting = self.interrupting & !(1 << counter) | u64::from(interrupts) << counter;
        if self.counters[counter].selection != selection {
            self.release(counter);
            self.counters[counter].selection = selection;
        }
        if self.runs(counter) {
            self.resume(1 << counter);
        }
    }

    fn runs(&self, counter: usize) -> bool {
        self.running & 1 << counter != 0
    }

    fn interrupts(&self, counter: usize) -> bool {
        self.interrupting & 1 << counter != 0
    }

    fn look_if_running(&mut self, counter: usize) {
        if self.runs(counter) {
            self.look_at(1 << counter);
        }
    }

    fn look_at(&mut self, counters: u64) {
        for index in 0..self.backings.len() {
            let Backed { users, deferred, .. } = &self.backings[index];
            if users & counters != 0 && deferred.is_none() {
                let look = self.count(index);
                self.take_over(index, &look, counters & self.running);
            }
        }
    }

    /// Updates the given running counters of a backing; all of them if its alarm has expired, so that the next alarm can be set.
    /// Returns true if an alarm was set.
    fn take_over(&mut self, index: usize, look: &Look, counters: u64) -> bool {
        let Backed { backing, users, alarm, .. } = &self.backings[index];
        let (all, estimated, due) = (users & self.running, backing.estimated(), look.count >= alarm.at);
        let came = due.then(|| self.alarm_came(index, look.count));
        let these = if due { all } else { all & counters };
        let interrupts =
            members(these).fold(false, |any, counter| any | self.advance(counter, look.count, estimated));
        if let Some(came) = came {
            self.renew_alarm(index, look.count, came, interrupts);
        } else if look.recovered {
            self.set_alarm_anew(index, look.count);
        }
        due || look.recovered
    }

    /// Adds what was counted while a counter ran. Returns true if it has overflowed and interrupts.
    fn advance(&mut self, counter: usize, count: u64, estimated: u64) -> bool {
        let interrupts = self.interrupts(counter);
        let mask = self.mask();
        let this = &mut self.counters[counter];
        let at = this.share.as_ref().map_or(u64::MAX, |share| share.overflow);
        let has_overflowed = this.advance(count, estimated, mask);
        if !has_overflowed && !this.put_off {
            return false;
        }
        let Some(share) = &mut this.share else { return false };
        self.statistics.clamps += u64::from(has_overflowed && interrupts && at < share.earliest);
        let is_told = count >= share.earliest || !interrupts;
        this.put_off = !is_told;
        if is_told {
            this.overflows += 1;
            share.earliest = count.saturating_add(self.least_period);
            self.overflowed |= 1 << counter;
        }
        is_told && interrupts
    }
}
