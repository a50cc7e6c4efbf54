//! A vCPU's counters: their values, which of them run, and which have overflowed.
//!
//! What counts behind a counter is shared by all that select the same, lives as long as one of them does so, and never stops:
//! a counter that stands still just does not take over what was counted meanwhile. So stopping, starting and reading cost
//! the host nothing but a look at the count. Only an alarm, for the next overflow, is a request to the host, and it is made
//! as seldom as can be: one that comes early does no harm, because whether a counter has overflowed is computed from its value.

mod alarms;
mod backings;
mod counter;
mod floor;
mod gap;
mod hardware;
mod hold;
mod report;
#[cfg(test)]
mod tests;

use std::time::Duration;

use log::debug;

use crate::event::{Event, Selection};
use crate::journal::{Entry, Journal};
use crate::notice::{Notice, Notices};
use crate::policy::Policy;
use crate::report::Statistics;
use crate::set::{first, members};
use crate::source::{Backing, FAR, Obeyed, Source};
use backings::Backed;
use counter::Counter;
use floor::Floor;
use hardware::Look;

/// Whether anybody is to know of an overflow when it happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Alarm {
    /// Yes: the guest wants an interrupt.
    AtOverflow,
    /// It is enough to find out when somebody looks.
    Off,
}

/// The counters, numbered from 0; sets of them are bit masks.
pub struct Bank<S: Source> {
    source: S,
    width: u32,
    counters: Vec<Counter>,
    /// What counts for them, each for all that select the same.
    backings: Vec<Backed<S::Backing>>,
    running: u64,
    /// Those with [`Alarm::AtOverflow`].
    interrupting: u64,
    overflowed: u64,
    /// Those that stood still when [`Self::release_idle`] was last called, and have done so since.
    idle: u64,
    floor: Floor,
    /// Whether a guest that is interrupted is expected to stop all counters before anything else.
    expects_stop: bool,
    /// Whether an alarm waits for that.
    awaits_stop: bool,
    /// What the policy wants between two overflows that interrupt.
    least_period: u64,
    /// When the counters were last looked at because time had passed.
    last_beat: Duration,
    /// Those that were found without hardware. This is asked at every exit.
    starved: u64,
    /// Whether one has lost its hardware, or got it back, since that was last forgotten.
    hardware_changed: bool,
    notices: Notices,
    journal: Journal,
    statistics: Statistics,
    /// How many overflows there had been when the last alarm came.
    overflows_at_alarm: u64,
}

impl<S: Source> Bank<S> {
    /// So many counters of so many bits, all zero, which select nothing and stand still.
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
            last_beat: Duration::ZERO,
            starved: 0,
            hardware_changed: false,
            notices: Notices::default(),
            journal: Journal::default(),
            statistics: Statistics::default(),
            overflows_at_alarm: 0,
        }
    }

    /// All counters.
    pub fn all(&self) -> u64 {
        first(self.counters.len())
    }

    /// How many counters there are.
    pub fn size(&self) -> usize {
        self.counters.len()
    }

    /// Sets what a counter counts. It keeps its value.
    pub fn configure(&mut self, counter: usize, selection: Option<Selection>, alarm: Alarm) {
        let interrupts = alarm == Alarm::AtOverflow;
        let before = (self.counters[counter].selection, self.interrupts(counter));
        self.look_if_running(counter);
        if before != (selection, interrupts) {
            self.counters[counter].put_off = false;
        }
        self.reconfigure(counter, selection, interrupts);
    }

    /// Has something else count for a counter, of which the guest knows nothing: an overflow that was put off still comes.
    pub fn select(&mut self, counter: usize, selection: Option<Selection>) {
        if self.counters[counter].selection != selection {
            self.look_if_running(counter);
            self.reconfigure(counter, selection, self.interrupts(counter));
        }
    }

    /// Says which counters run; all others stand still.
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

    /// What a counter shows.
    pub fn read(&mut self, counter: usize) -> u64 {
        self.look_if_running(counter);
        self.counters[counter].value
    }

    /// What it showed when it was last looked at.
    pub fn value(&self, counter: usize) -> u64 {
        self.counters[counter].value
    }

    /// Sets what a counter shows, as far as it is wide.
    pub fn write(&mut self, counter: usize, value: u64) {
        let mask = self.mask();
        let value = value & mask;
        // The alarm of one that stands still is set when it goes on.
        let index = if self.runs(counter) { self.backing_of(counter) } else { None };
        if let Some(held) = index.and_then(|index| self.backings[index].held.as_mut()) {
            held.written = true;
            self.counters[counter].set(value, mask);
            return;
        }
        self.look_if_running(counter);
        self.counters[counter].set(value, mask);
        if let (Some(index), Some(share)) = (index, &self.counters[counter].share) {
            self.set_alarm(index, share.mark);
        }
    }

    /// Looks what counters that run have counted.
    pub fn look(&mut self) {
        self.look_at(self.running);
    }

    /// Looks whether alarms have come, after a signal that says so, and at what has overflowed. An alarm comes also while
    /// its counters stand still.
    pub fn look_at_all(&mut self) {
        self.look_at(self.all());
    }

    /// Some time has passed: counters that have lost their hardware are found out.
    pub fn beat(&mut self) {
        self.look_at_all();
        self.last_beat = self.source.now();
    }

    /// Gives back to the host what counts for counters that have stood still since this was last called.
    pub fn release_idle(&mut self) {
        let stand_still = self.backed() & !self.running;
        for counter in members(stand_still & self.idle) {
            debug!("counter {counter} stands still: its hardware is given back");
            self.release(counter);
        }
        self.idle = stand_still;
    }

    /// Whether the host has such an event at all.
    pub fn can_count(&mut self, event: Event) -> bool {
        self.source.can_count(event)
    }

    /// How late it is.
    pub fn now(&self) -> Duration {
        self.source.now()
    }

    /// From now on counts as the operator wants it to.
    pub fn obey(&mut self, policy: &Policy) {
        self.look_at_all();
        self.least_period = policy.least_period.get().min(FAR);
        if self.source.obey(policy) == Obeyed::FromTheNextOn {
            members(self.backed()).for_each(|counter| self.release(counter));
            self.resume(self.running);
        }
    }

    /// Whether a guest that is interrupted will stop all counters, and look only then which have overflowed.
    pub fn expect_stop(&mut self, expected: bool) {
        self.expects_stop = expected;
    }

    /// It was not interrupted, or does something else: alarms that wait for that are set as ever.
    pub fn wait_no_longer(&mut self) {
        if !std::mem::take(&mut self.awaits_stop) {
            return;
        }
        for index in 0..self.backings.len() {
            // That of one that is held is set when it is let go.
            if self.backings[index].held.is_some() {
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

    /// An alarm has come, and it was looked which counters have overflowed.
    pub fn alarm(&mut self) {
        self.statistics.alarms += 1;
        let overflows = self.overflows();
        // What it was for may have been found before, on the way here.
        if std::mem::replace(&mut self.overflows_at_alarm, overflows) == overflows {
            self.statistics.ignored_alarms += 1;
        }
    }

    /// The counters that have overflowed since this was last asked, as far as they were looked at.
    pub fn take_overflowed(&mut self) -> u64 {
        std::mem::take(&mut self.overflowed)
    }

    /// What the operator is to know since this was last asked.
    pub fn take_notices(&mut self) -> Vec<Notice> {
        self.notices.take()
    }

    /// Where everything is written down.
    pub fn journal(&mut self) -> &mut Journal {
        &mut self.journal
    }

    fn mask(&self) -> u64 {
        u64::MAX >> (u64::BITS - self.width)
    }

    /// Has the operator know of it, unless there was too much of late; whether he will.
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
            let Backed { users, held, .. } = &self.backings[index];
            if users & counters != 0 && held.is_none() {
                let look = self.count(index);
                self.take_over(index, &look, counters & self.running);
            }
        }
    }

    /// These of a backing's counters, which run, take over what was counted. If its alarm has come all do, so that the next can
    /// be set. Whether one was.
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

    /// Takes over what was counted while a counter ran; whether that interrupts.
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
