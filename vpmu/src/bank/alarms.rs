//! The alarms of what counts. A backing has one, for the nearest overflow of its counters that is to interrupt. To set it is a
//! request to the host, so one that comes early is kept: whether a counter has overflowed is computed.
//!
//! The host repeats an alarm with the same distance, however short that was. In a guest that has stopped its counters to
//! handle the overflow a short one could come over and over, and the guest never get on. So an alarm is for once,
//! unless one repetition is harmless: the guest's next overflow is often at the same distance, and then needs nothing more.

use std::time::Duration;

use super::Bank;
use super::backings::Backed;
use super::floor::{self, Tell};
use crate::mask::{self, members};
use crate::notice::Notice;
use crate::source::{Backing, FAR, Refusal, Source};

/// An alarm that repeats after at least so many counts may be left to repeat, as far as the guest is concerned: its handler is
/// done before it comes again.
const LONG: u64 = 8192;

/// A guest that is expected to stop its counters when it is interrupted has so many counts before the next alarm, if that does
/// not just repeat: enough to set them anew. If it does not stop them, one overflow is told as much too late.
const PATIENCE: u64 = 65_536;

/// The alarm that is set.
#[derive(Debug, Clone, Copy)]
pub struct Armed {
    /// The count at which it comes.
    pub at: u64,
    /// How many counts after it was set; the host repeats it with this distance.
    pub distance: u64,
    /// The counter for whose overflow it was set, if there was one, as a set.
    pub of: u64,
    pub standing: Standing,
}

/// Whether an alarm is kept if it comes early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// It is.
    Firm,
    /// It is not: it was set while the guest had an overflow to handle, and it would always come early by what is counted
    /// in the handler.
    ForNow,
    /// Nor is this one, which has come and was left to repeat.
    Repeats,
}

/// An alarm has come.
#[derive(Debug, Clone, Copy)]
pub struct Came {
    /// When.
    pub now: Duration,
    /// How long after the last.
    pub after: Duration,
}

/// An overflow that is to come.
#[derive(Debug, Clone, Copy)]
pub struct Next {
    /// The count of the backing at which it needs an alarm.
    pub at: u64,
    /// Whose it is.
    pub counter: usize,
}

impl<S: Source> Bank<S> {
    /// The alarm of a backing that has counted so much has come. For which counters that was is still to be seen by their
    /// marks, and each has its own distance from the last: the alarms of several may be as close as they like.
    pub(super) fn alarm_came(&mut self, index: usize, count: u64) -> Came {
        let now = self.source.now();
        let least = self.floor.distance(|| now);
        let Backed { users, alarm, ref mut last_alarm, .. } = self.backings[index];
        let interval = now.saturating_sub(std::mem::replace(last_alarm, now));
        let is_due = |counter: &usize| self.wanted(*counter, least).is_some_and(|wanted| wanted <= count);
        let interrupt = members(users & self.running & self.interrupting);
        let due = mask::of(interrupt.filter(is_due)) | alarm.of & users;
        let mut told = None;
        for counter in members(due) {
            let Some(share) = &mut self.counters[counter].share else { continue };
            let before = std::mem::replace(&mut share.last_alarm, count);
            if alarm.at.saturating_sub(before) < floor::PERIOD
                && let Tell::Raised(times) = self.floor.short_alarm(now)
            {
                told = Some(times);
            }
        }
        if let Some(times) = told {
            self.tell(Notice::RateFloor { period: floor::PERIOD, times });
        }
        Came { now, after: interval }
    }

    /// Sets the next alarm of a backing whose last one has come, when all its counters were looked at. A guest that is
    /// interrupted is going to stop them, and then has the alarm set again if it has to be.
    pub(super) fn renew_alarm(&mut self, index: usize, count: u64, came: Came, interrupts: bool) {
        let Backed { users, alarm, .. } = self.backings[index];
        let next = self.nearest(users, count);
        let is_near = |next: Next| next.at < count.saturating_add(FAR);
        let again = alarm.at.saturating_add(alarm.distance);
        let is_harmless = interrupts
            && alarm.standing != Standing::Repeats
            && alarm.distance >= LONG
            && again > count
            && self.source.may_repeat(came.now, came.after);
        let waits = interrupts && self.expects_stop && !self.counts_programs_only(index);
        self.awaits_stop |= waits;
        let of = match next {
            Some(next) if again == next.at => Some(1 << next.counter),
            // That of another counter which the handler does not put off is set now: so the handler needs no exit for it.
            Some(next) if is_near(next) && self.counts_programs_only(index) => None,
            Some(next) if again < next.at || waits => Some(alarm.of),
            _ => None,
        };
        match (of, next) {
            (Some(of), _) if is_harmless => {
                self.backings[index].alarm = Armed { at: again, of, standing: Standing::Repeats, ..alarm };
            }
            (_, Some(mut next)) if is_near(next) => {
                let standing = if interrupts { Standing::ForNow } else { Standing::Firm };
                if waits {
                    next.at = next.at.max(count.saturating_add(PATIENCE));
                }
                self.arm(index, count, next, standing);
            }
            _ => self.disarm(index, count),
        }
    }

    /// Sets the alarm of a backing that has counted so much, unless one is set that comes early enough.
    pub(super) fn set_alarm(&mut self, index: usize, count: u64) {
        let Some(next) = self.nearest(self.backings[index].users, count) else { return };
        let alarm = &mut self.backings[index].alarm;
        // One that comes a single count early would leave a period of 1, of which Linux makes 2.
        let comes_late = next.at < alarm.at;
        let comes_a_count_early = alarm.at.checked_add(1) == Some(next.at);
        let is_not_kept = next.at > alarm.at && alarm.standing != Standing::Firm;
        if comes_late || comes_a_count_early || is_not_kept {
            self.arm(index, count, next, Standing::Firm);
        } else {
            alarm.standing = Standing::Firm;
        }
    }

    /// The nearest overflow of these counters that needs an alarm, which can come at the next count.
    pub(super) fn nearest(&mut self, counters: u64, count: u64) -> Option<Next> {
        let least = self.floor.distance(|| self.source.now());
        let all = members(counters & self.running & self.interrupting)
            .filter_map(|counter| Some(Next { at: self.wanted(counter, least)?, counter }));
        let next = all.min_by_key(|next| next.at)?;
        let (soonest, latest) = (count.saturating_add(1), count.saturating_add(FAR));
        Some(Next { at: next.at.clamp(soonest, latest), ..next })
    }

    /// The count at which a counter that runs and interrupts needs an alarm, that far from its last at least.
    fn wanted(&self, counter: usize, least: u64) -> Option<u64> {
        let this = &self.counters[counter];
        let share = this.share.as_ref()?;
        if this.put_off {
            return Some(share.earliest);
        }
        // The last alarm is behind the mark, so that the floor does not move while the guest rewrites its counter.
        Some(share.overflow.max(share.last_alarm.saturating_add(least)).max(share.earliest))
    }

    /// Sets it in any case: what was estimated while there was no hardware brings overflows nearer.
    pub(super) fn set_alarm_anew(&mut self, index: usize, count: u64) {
        if let Some(next) = self.nearest(self.backings[index].users, count) {
            self.arm(index, count, next, Standing::Firm);
        }
    }

    fn arm(&mut self, index: usize, count: u64, next: Next, standing: Standing) {
        self.ask(index, count, next.at, 1 << next.counter, standing);
    }

    fn disarm(&mut self, index: usize, count: u64) {
        self.ask(index, count, count.saturating_add(FAR), 0, Standing::Firm);
    }

    fn ask(&mut self, index: usize, count: u64, at: u64, of: u64, standing: Standing) {
        let backed = &mut self.backings[index];
        let count = if backed.deferred.is_some() { backed.backing.count().number() } else { count };
        let distance = at.saturating_sub(count).max(1);
        backed.alarm = Armed { at, distance, of, standing };
        if let Err(Refusal(why)) = backed.backing.arm(distance) {
            for counter in members(backed.users & self.interrupting) {
                self.tell(Notice::Unarmed { counter, why: why.clone() });
            }
        }
    }
}
