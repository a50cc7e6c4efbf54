//! Counters of programs while the guest's kernel handles an overflow: as long as it does so they cannot count. So the kernel
//! can stop them, set them anew and have them go on, and nobody need know before it has: it makes no difference when.
//!
//! The bank is **held** at what they had counted when the kernel was interrupted. What is done to it after that is done as of
//! then, and what the programs have counted since is taken over when it is let go. So nothing is lost, whatever the guest does.

use std::ops::RangeInclusive;

use super::Bank;
use super::alarms::Standing;
use crate::event::{Filter, Scope};
use crate::set::members;
use crate::source::Source;

/// A backing that is held.
#[derive(Debug, Clone, Copy)]
pub struct Held {
    /// What it had counted.
    pub count: u64,
    /// Whether one of its counters was set since.
    pub written: bool,
}

impl<S: Source> Bank<S> {
    /// Holds the counters that run, if all of them count programs only, and exactly; whether it does. All were looked at since
    /// the guest ran.
    pub fn hold(&mut self) -> bool {
        if self.running == 0 || self.overflowed != 0 || self.starved != 0 {
            return false;
        }
        let mut others = self.running;
        for index in 0..self.backings.len() {
            let users = self.backings[index].users;
            if users & self.running != 0 && !self.counts_programs_only(index) {
                return false;
            }
            others &= !users;
        }
        if others != 0 || members(self.running).any(|counter| self.counters[counter].put_off) {
            return false;
        }
        for index in 0..self.backings.len() {
            if let Some(mark) = self.mark_of(index) {
                self.backings[index].held = Some(Held { count: mark, written: false });
            }
        }
        true
    }

    /// Whether what a backing counts stands still while the guest's kernel runs.
    pub(super) fn counts_programs_only(&self, index: usize) -> bool {
        let selection = self.backings[index].selection;
        (selection.filter, selection.scope) == (Filter::User, Scope::Guest)
    }

    /// Takes over what was counted since they are held, and looks at all others.
    pub fn let_go(&mut self) {
        for index in 0..self.backings.len() {
            let held = self.backings[index].held.filter(|held| held.written);
            // Of one that repeats it is to be known whether that was right before it comes again.
            let repeats = self.backings[index].alarm.standing == Standing::Repeats;
            if let Some(Held { count, .. }) = held.filter(|_| repeats) {
                self.set_alarm(index, count);
            }
            self.backings[index].held = None;
            let look = self.count(index);
            let has_alarm = self.take_over(index, &look, self.running);
            if held.is_some() && !repeats && !has_alarm {
                self.set_alarm(index, look.count);
            }
        }
    }

    /// What a counter that is held can be set to without anything to do for the host: its overflow then has an alarm.
    pub fn free_values(&self, counter: usize) -> Option<RangeInclusive<u64>> {
        if !self.runs(counter) {
            return None;
        }
        let backed = self.backings.iter().find(|backed| backed.users & 1 << counter != 0)?;
        let (held, alarm) = (backed.held?, backed.alarm);
        let less_than_all = alarm.at.checked_sub(held.count)?.checked_sub(1)?;
        let value = self.mask().checked_sub(less_than_all)?;
        // An alarm that is for another counter's overflow stays, however far away this one's is.
        let is_for_another = alarm.of & !(1 << counter) != 0;
        Some(if is_for_another { 0..=value } else { value..=value })
    }

    /// What has counted for a backing's counters that run, as of the last look at them.
    fn mark_of(&self, index: usize) -> Option<u64> {
        let counter = members(self.backings[index].users & self.running).next()?;
        Some(self.counters[counter].share.as_ref()?.mark)
    }
}
