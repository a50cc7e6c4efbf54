//! Deferred changes. While the guest's kernel handles an overflow, counters that count user mode only cannot count. The kernel
//! stops them, writes them and starts them again, and it makes no difference when these changes are made.
//!
//! [`Bank::defer`] remembers what each host event had counted when the kernel was interrupted. Changes after that are made as of
//! that count. [`Bank::commit`] then adds what the programs have counted since. So no count is lost, whatever the guest does.

use std::ops::RangeInclusive;

use super::Bank;
use super::alarm::AlarmKind;
use crate::mask::members;
use crate::source::Source;

/// A host event whose counters' changes are deferred.
#[derive(Debug, Clone, Copy)]
pub struct Deferred {
    /// Count of the event at that time.
    pub count: u64,
    /// One of its counters was written since.
    pub written: bool,
}

impl<S: Source> Bank<S> {
    /// Defers changes to the running counters until [`Self::commit`]. Returns false, and does nothing, unless all of them count
    /// user mode only and are exact. All counters must have been updated since the guest ran.
    pub fn defer(&mut self) -> bool {
        if self.running == 0 || self.overflowed != 0 || self.hardware.starved() != 0 {
            return false;
        }
        let mut others = self.running;
        for index in 0..self.events.len() {
            let users = self.events[index].users;
            if users & self.running != 0 && !self.events[index].user_only() {
                return false;
            }
            others &= !users;
        }
        if others != 0 || members(self.running).any(|counter| self.counters[counter].overflow_delayed) {
            return false;
        }
        for index in 0..self.events.len() {
            if let Some(mark) = self.mark_of(index) {
                self.events[index].deferred = Some(Deferred { count: mark, written: false });
            }
        }
        true
    }

    /// Ends the deferral: adds what was counted since, and updates all counters.
    pub fn commit(&mut self) {
        for index in 0..self.events.len() {
            let deferred = self.events[index].deferred.filter(|deferred| deferred.written);
            // A repeating alarm is checked before it expires again.
            let repeats = self.events[index].alarm.kind == AlarmKind::Repeating;
            if let Some(Deferred { count, .. }) = deferred.filter(|_| repeats) {
                self.set_alarm(index, count);
            }
            self.events[index].deferred = None;
            let reading = self.count(index);
            let has_alarm = self.update_event_users(index, &reading, self.running);
            if deferred.is_some() && !repeats && !has_alarm {
                self.set_alarm(index, reading.count);
            }
        }
    }

    /// Returns the values that a deferred counter can be written without a request to the host: with each of them, an alarm is
    /// set for its next overflow.
    pub fn no_exit_values(&self, counter: usize) -> Option<RangeInclusive<u64>> {
        if !self.runs(counter) {
            return None;
        }
        let event = &self.events[self.event_of(counter)?];
        let (deferred, alarm) = (event.deferred?, event.alarm);
        let less_than_all = alarm.at.checked_sub(deferred.count)?.checked_sub(1)?;
        let value = self.mask().checked_sub(less_than_all)?;
        // An alarm for another counter's overflow stays, however far away this counter's overflow is.
        let is_for_another = alarm.counter_mask & !(1 << counter) != 0;
        Some(if is_for_another { 0..=value } else { value..=value })
    }

    /// Returns the count of a host event at the last update of its running counters.
    pub(super) fn mark_of(&self, index: usize) -> Option<u64> {
        let counter = members(self.events[index].users & self.running).next()?;
        Some(self.counters[counter].share.as_ref()?.mark)
    }
}
