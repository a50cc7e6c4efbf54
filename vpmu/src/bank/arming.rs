//! Carries out what [`super::next_alarm`] decides: finds the nearest overflow, and sets the host event's alarm.

use super::Bank;
use super::floor;
use super::next_alarm::{AlarmKind, Armed, Expired, Interrupting, NextAlarm, NextOverflow};
use crate::mask::{self, members};
use crate::notice::Notice;
use crate::source::{Backing, FAR, Refusal, Source};

/// Greatest distance of an alarm that expires before long. The overflow of a counter that only counts is farther away.
pub const SOON: u64 = 1 << 36;

impl<S: Source> Bank<S> {
    /// Returns whether an alarm of a running counter expires before long.
    pub fn interrupts_soon(&self) -> bool {
        let counters = self.running & self.interrupting;
        counters != 0
            && self.events.iter().any(|event| event.users & counters != 0 && event.alarm.distance < SOON)
    }

    /// Records that the alarm of a host event has expired at this count. The counters that it was for are found by
    /// their marks, and each has its own distance from its last alarm: the alarms of several counters may be as close
    /// as they like.
    pub(super) fn expire(&mut self, index: usize, count: u64) {
        let now = self.source.now();
        let least = self.floor.distance(|| now);
        let least_interval = self.source.least_interval(now);
        let event = &mut self.events[index];
        let (users, alarm) = (event.users, event.alarm);
        event.load.add_alarm(now, least_interval);
        let is_due = |counter: &usize| self.wanted(*counter, least).is_some_and(|wanted| wanted <= count);
        let interrupting = members(users & self.running & self.interrupting);
        let due = mask::of(interrupting.filter(is_due)) | alarm.counter_mask & users;
        let mut raised = None;
        // Processors interrupt thousands of counts after the overflow. Overflows are as far apart all the same.
        for counter in members(due) {
            let Some(share) = &mut self.counters[counter].share else { continue };
            let before = std::mem::replace(&mut share.last_alarm, alarm.at);
            if alarm.at.saturating_sub(before) < floor::PERIOD
                && let Some(times) = self.floor.short_alarm(now)
            {
                raised = Some(times);
            }
        }
        if let Some(times) = raised {
            self.add_notice(Notice::RateFloor { period: floor::PERIOD, times });
        }
    }

    /// Sets the next alarm of a host event whose last one has expired, after its counters were updated. `interrupts`
    /// says that one of them interrupts the guest: the kernel is going to stop the counters, and the alarm is then set
    /// again if it has to be.
    pub(super) fn renew_alarm(&mut self, index: usize, count: u64, interrupts: bool) {
        if interrupts && let Some(next) = self.predict(index, count) {
            return self.set_early_alarm(index, count, next);
        }
        let next = self.nearest(self.events[index].users, count);
        let event = &mut self.events[index];
        let (stops_first, may_repeat) = (self.coalescing.can_wait(), event.load.may_repeat());
        let interrupt = interrupts.then_some(Interrupting { stops_first, may_repeat });
        let user_only = event.user_only();
        let expired = Expired { alarm: event.alarm, count, next, user_only, interrupt };
        if expired.waits() {
            self.coalescing.alarm_waits();
        }
        match expired.next_alarm() {
            NextAlarm::Repeat(alarm) => event.alarm = alarm,
            NextAlarm::Set(next, kind) => self.arm(index, count, next, kind),
            NextAlarm::Off => self.disarm(index, count),
        }
    }

    /// Sets the alarm of a host event that has counted `count`, unless the alarm that is set serves.
    pub(super) fn set_alarm(&mut self, index: usize, count: u64) {
        let Some(next) = self.nearest(self.events[index].users, count) else { return };
        let alarm = &mut self.events[index].alarm;
        if alarm.serves(next) {
            alarm.kind = if alarm.early == 0 { AlarmKind::Kept } else { AlarmKind::OneShot };
        } else {
            self.arm(index, count, next, AlarmKind::Kept);
        }
    }

    /// Replaces the alarm in any case: what was estimated while there was no hardware brings overflows nearer.
    pub(super) fn replace_alarm(&mut self, index: usize, count: u64) {
        if let Some(next) = self.nearest(self.events[index].users, count) {
            self.arm(index, count, next, AlarmKind::Kept);
        }
    }

    /// Returns the nearest overflow of these counters that needs an alarm, at the next count or later.
    pub(super) fn nearest(&mut self, counters: u64, count: u64) -> Option<NextOverflow> {
        let least = self.floor.distance(|| self.source.now());
        let all = || {
            members(counters & self.running & self.interrupting)
                .filter_map(|counter| Some(NextOverflow { at: self.wanted(counter, least)?, counter }))
        };
        let mut next = all().min_by_key(|next| next.at)?;
        let late = self.may_be_late(counters, next.counter);
        if late > 0 {
            // The last of those that the nearest may wait for.
            next = all().filter(|other| other.at - next.at <= late).max_by_key(|other| other.at)?;
        }
        let (soonest, latest) = (count.saturating_add(1), count.saturating_add(FAR));
        Some(NextOverflow { at: next.at.clamp(soonest, latest), ..next })
    }

    /// Returns the count at which a running counter that interrupts needs an alarm, at least `least` after its last.
    fn wanted(&self, counter: usize, least: u64) -> Option<u64> {
        let this = &self.counters[counter];
        let share = this.share.as_ref()?;
        if this.overflow_delayed {
            return Some(share.earliest);
        }
        // The last alarm is before the mark, so that the floor does not move while the guest rewrites its counter.
        Some(share.overflow.max(share.last_alarm.saturating_add(least)).max(share.earliest))
    }

    /// Sets the alarm for an overflow, early by half of what it may be.
    pub(super) fn arm(&mut self, index: usize, count: u64, next: NextOverflow, kind: AlarmKind) {
        let early = self.may_be_early(index, next.at.saturating_sub(count));
        let kind = if early == 0 { kind } else { AlarmKind::OneShot };
        self.ask(
            index,
            count,
            Armed { at: next.at - early / 2, distance: 0, counter_mask: 1 << next.counter, kind, early },
        );
    }

    fn disarm(&mut self, index: usize, count: u64) {
        let at = count.saturating_add(FAR);
        self.ask(index, count, Armed { at, distance: 0, counter_mask: 0, kind: AlarmKind::Kept, early: 0 });
    }

    /// Asks the host for an alarm, whose distance follows from the event's count. `count` is that of the last update.
    fn ask(&mut self, index: usize, count: u64, alarm: Armed) {
        let event = &mut self.events[index];
        let count =
            if event.deferred.is_some() { event.count().number() } else { count.min(event.last_count) };
        let distance = alarm.at.saturating_sub(count).max(1);
        event.alarm = Armed { distance, ..alarm };
        if let Err(Refusal(why)) = event.backing.arm(distance) {
            for counter in members(event.users & self.interrupting) {
                self.add_notice(Notice::Unarmed { counter, why: why.clone() });
            }
        }
    }
}
