//! Counts that are marked at an exit. A counter of user mode stands still as long as no program runs. So a change that
//! the guest's kernel makes before a program runs is made as of the exit before it, however late the VMM learns of it.

use super::Bank;
use super::counter::Share;
use super::deferral::Deferred;
use super::next_alarm::AlarmKind;
use crate::mask::members;
use crate::source::Source;

/// Masks of the counters whose host events' counts were marked at an exit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Marked {
    /// They count user mode only.
    pub programs: u64,
    /// They count time, also in the kernel.
    pub time: u64,
}

impl<S: Source> Bank<S> {
    /// Updates all counters of user mode, if `with_time` also those of the time that passes in the kernel, and marks
    /// what their host events have counted. Counters without hardware are left out.
    pub fn mark_exit(&mut self, with_time: bool) -> Marked {
        let mut marked = Marked::default();
        for index in 0..self.events.len() {
            let event = &mut self.events[index];
            event.exit_mark = None;
            let user_only = event.user_only();
            if !(user_only || with_time && event.counts_time()) {
                continue;
            }
            let reading = self.count(index);
            // After an alarm they have been updated already; after a read, one of them has.
            let is_behind = |share: &Share| share.mark != reading.count;
            let running = members(self.events[index].users & self.running);
            let mut shares = running.filter_map(|counter| self.counters[counter].share.as_ref());
            if reading.recovered || shares.any(is_behind) {
                self.update_event_users(index, &reading, self.running);
            }
            let users = self.events[index].users;
            let is_exact = users & self.hardware.starved() == 0
                && members(users).all(|counter| !self.counters[counter].overflow_delayed);
            if is_exact {
                self.events[index].exit_mark = Some(reading.count);
                *(if user_only { &mut marked.programs } else { &mut marked.time }) |= users;
            }
        }
        marked
    }

    /// Makes all changes until [`Self::commit`] as of the marked counts.
    pub fn rewind(&mut self) {
        for event in &mut self.events {
            event.deferred =
                event.exit_mark.take().map(|count| Deferred { count, written: false, stop: None });
        }
    }

    /// Forgets the marked counts.
    pub fn forget_marks(&mut self) {
        for event in &mut self.events {
            event.exit_mark = None;
        }
    }

    /// Returns the values with which a counter may be started without a request to the host: with this value, and with
    /// all values up to the second one, an alarm is set for its next overflow. Returns `None` if its event's count is
    /// not marked.
    pub fn start_values(&self, counter: usize) -> Option<[u64; 2]> {
        let event = &self.events[self.event_of(counter)?];
        let (count, alarm) = (event.exit_mark?, event.alarm);
        if !self.interrupts(counter) {
            return Some([0, self.mask()]);
        }
        let less_than_all = alarm.at.checked_sub(count)?.checked_sub(1)?;
        let value = self.mask().checked_sub(less_than_all)?;
        // An alarm that expires early by more than a count is kept, unless it was set for this counter and has expired.
        let is_kept = alarm.kind == AlarmKind::Kept || alarm.counter_mask & !(1 << counter) != 0;
        Some([value, if is_kept { value.saturating_sub(2) } else { 0 }])
    }
}
