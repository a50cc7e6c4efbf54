//! Instructions that the VMM completes. On a processor, an access to a PMU register or to a device retires like any
//! other instruction. In a guest it exits, and the VMM or KVM carries it out, so the host's event does not count it. It
//! is added here.

use std::cell::LazyCell;

use super::Bank;
use crate::event::{Event, Filter};
use crate::mask::members;
use crate::source::Source;

impl<S: Source> Bank<S> {
    /// Sets which events count all retired instructions. Must be called before any counter counts.
    pub fn set_instruction_events(&mut self, events: &'static [Event]) {
        self.instruction_events = events;
    }

    /// Adds an instruction to the running events that count instructions in its mode. `is_user` is called only if that
    /// makes a difference. Returns the mask of these events, for [`Self::take_back`].
    pub fn complete(&mut self, is_user: impl FnOnce() -> bool) -> u64 {
        let mut counted = 0;
        if self.running == 0 {
            return counted;
        }
        let is_user = LazyCell::new(is_user);
        for (index, event) in self.events.iter_mut().enumerate() {
            let is_counted = event.counts_instructions
                && event.users & self.running != 0
                && match event.selection.filter {
                    Filter::All => true,
                    Filter::User => *is_user,
                    Filter::Kernel => !*is_user,
                };
            if is_counted {
                event.complete(1);
                counted |= 1 << index;
            }
        }
        self.has_late_alarms |= counted != 0;
        counted
    }

    /// Takes back what [`Self::complete`] has just added to these events, because the instruction has faulted. Nothing
    /// may have been done since.
    pub fn take_back(&mut self, events: u64) {
        for index in members(events) {
            self.events[index].take_back(1);
        }
    }

    /// Finds overflows at instructions that were completed, and sets the alarms that they have made late. Returns
    /// whether there were such alarms.
    pub fn settle_completed(&mut self) -> bool {
        if !std::mem::take(&mut self.has_late_alarms) {
            return false;
        }
        let mut were_late = false;
        for index in 0..self.events.len() {
            let event = &mut self.events[index];
            let is_late = std::mem::take(&mut event.is_alarm_late);
            let interrupting = event.users & self.running & self.interrupting;
            let alarm_at = event.alarm.at;
            if !is_late || event.deferred.is_some() || !self.overflows_before(interrupting, alarm_at) {
                continue;
            }
            were_late = true;
            let reading = self.count(index);
            // An alarm that waits for the kernel's stop is set then.
            if !self.update_event_users(index, &reading, interrupting) && !self.coalescing.awaits_stop() {
                self.set_alarm(index, reading.count);
            }
        }
        were_late
    }

    /// Returns whether one of these counters overflows before its host event has counted this much.
    fn overflows_before(&self, counters: u64, count: u64) -> bool {
        members(counters).any(|counter| {
            let counter = &self.counters[counter];
            counter.overflow_delayed || counter.share.as_ref().is_some_and(|share| share.overflow < count)
        })
    }
}
