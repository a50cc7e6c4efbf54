//! Deferred changes. While the guest's kernel handles an overflow, counters that count user mode only cannot count. The
//! kernel stops them, writes them and starts them again, and it makes no difference when these changes are made. What
//! other counters count in the handler can be estimated for some events ([`super::handler`]).
//!
//! [`Bank::defer`] remembers what each host event had counted when the kernel was interrupted. Changes after that are
//! made as of that count. [`Bank::commit`] then adds what the programs have counted since. So no count is lost,
//! whatever the guest does.

use std::ops::RangeInclusive;

use super::Bank;
use super::estimate::{Estimate, Handler};
use super::next_alarm::AlarmKind;
use crate::mask::members;
use crate::source::Source;

/// A host event whose counters' changes are deferred.
#[derive(Debug, Clone, Copy)]
pub struct Deferred {
    /// Count of the event at that time.
    pub count: u64,
    /// One of its counters was written since.
    pub written: bool,
    /// Where the kernel is estimated to stop its counters, if the event counts the handler.
    pub stop: Option<u64>,
}

/// What the kernel has done since changes were deferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Handled {
    /// It has not stopped the counters yet.
    Nothing,
    /// It has stopped them.
    Stopped,
    /// It has stopped them and started them again.
    Completely,
}

impl<S: Source> Bank<S> {
    /// Defers changes to the running counters until [`Self::commit`]. Returns false, and does nothing, unless all of
    /// them are exact, and count user mode only or can be estimated. All counters must have been updated since the
    /// guest ran. Counters whose handler is estimated may overflow in its beginning.
    pub fn defer(&mut self) -> bool {
        if self.running == 0 || self.overflowed != 0 || self.hardware.starved() != 0 {
            return false;
        }
        let mut others = self.running;
        for index in 0..self.events.len() {
            let users = self.events[index].users;
            let event = &self.events[index];
            let can_be_estimated = || event.estimate_next().is_some() && self.is_at_a_rate(users);
            if users & self.running != 0 && !event.user_only() && !can_be_estimated() {
                return false;
            }
            others &= !users;
        }
        if others != 0 || members(self.running).any(|counter| self.counters[counter].overflow_delayed) {
            return false;
        }
        for index in 0..self.events.len() {
            if let Some(mark) = self.mark_of(index) {
                let estimate = self.events[index].estimate_next();
                let (before, stop) = match estimate {
                    Some(Estimate { before, .. }) => (before, Some(self.run_to_stop(index, mark, before))),
                    None => (0, None),
                };
                let count = mark.saturating_add(before);
                self.events[index].deferred = Some(Deferred { count, written: false, stop });
            }
        }
        true
    }

    /// Ends the deferral: adds what was counted since, and updates all counters.
    pub fn commit(&mut self, handled: Handled) {
        for index in 0..self.events.len() {
            let deferred = self.events[index].deferred;
            if let Some(stop) = deferred.and_then(|deferred| deferred.stop) {
                match handled {
                    Handled::Nothing => {}
                    Handled::Stopped => self.stop_estimated(index, stop),
                    Handled::Completely => self.start_estimated(index),
                }
            }
            let deferred = deferred.filter(|deferred| deferred.written && deferred.stop.is_none());
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

    /// Returns the values that a deferred counter can be written without a request to the host: with each of them, an
    /// alarm is set for its next overflow.
    pub fn no_exit_values(&self, counter: usize) -> Option<RangeInclusive<u64>> {
        if !self.runs(counter) {
            return None;
        }
        let event = &self.events[self.event_of(counter)?];
        let (deferred, alarm) = (event.deferred?, event.alarm);
        let (start, early) = match (deferred.stop, event.handler.as_ref().and_then(Handler::estimate)) {
            (Some(_), Some(Estimate { during, .. })) => (deferred.count.saturating_add(during), alarm.early),
            _ => (deferred.count, 0),
        };
        let overflow_at = |count: u64| self.mask().checked_sub(count.checked_sub(start)?.checked_sub(1)?);
        let (Some(value), Some(first)) = (overflow_at(alarm.at), overflow_at(alarm.at.saturating_add(early)))
        else {
            // There are none.
            return Some(RangeInclusive::new(1, 0));
        };
        // An alarm for another counter's overflow stays, however far away this counter's overflow is.
        let is_for_another = alarm.counter_mask & !(1 << counter) != 0;
        Some(if is_for_another { 0..=value } else { first..=value })
    }

    /// Returns the count of a host event at the last update of its running counters.
    pub(super) fn mark_of(&self, index: usize) -> Option<u64> {
        let counter = members(self.events[index].users & self.running).next()?;
        Some(self.counters[counter].share.as_ref()?.mark)
    }
}
