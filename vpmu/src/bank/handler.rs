//! Estimates what the handler of an overflow counts, for events whose exact number nobody can know there.
//!
//! An event that counts the guest's kernel counts the beginning of the handler, until this stops the counters, and must
//! not count the rest. To know both numbers takes an exit where the handler stops the counters, and one where it starts
//! them. They are worth that for instructions. But no processor takes the same number of cycles twice for the same
//! code. So while a guest samples cycles at a rate (`perf record -F`), one overflow of sixteen is handled with these
//! exits, and the means of the last eight of them are taken for the others, which the handler can then do on the shared
//! page ([`Bank::defer`]). A mean is neither too high nor too low in the long run, so the sum of what a counter counts
//! stays right.
//!
//! At a rate, each period differs a little from the last. So that not each needs a request to the host, an alarm is set
//! a little early, and an overflow that is near counts as one that has happened: the counter is *ahead*. It then stands
//! still until its event has counted as much. It is a sample at another place, which is as good as any at a rate, and
//! the sum stays right here, too. Where the period stays the same, nothing is estimated.
//!
//! Several events that are sampled at one rate overflow near each other, but perf gives each a period of its own. The
//! overflow of one then waits for those that are near, and all are one interrupt. It is reported late, as a processor
//! reports each overflow a little late, and all counts stay exact. This holds for all events.

use super::Bank;
use super::arming::SOON;
use super::counter::{Counter, Share};
use super::estimate::{Estimate, Handler};
use super::host_event::HostEvent;
use super::next_alarm::{AlarmKind, Armed, MIN_REPEAT_DISTANCE, NextOverflow};
use crate::event::Event;
use crate::mask::members;
use crate::source::{Backing, Source};

/// Greatest number of counts by which a counter may be ahead, and its part of the period.
const MAX_AHEAD: u64 = 8192;
const AHEAD_OF_PERIOD: u64 = 32;
/// Greatest number of counts by which an overflow may be reported late, and its part of the period.
const MAX_LATE: u64 = 32_768;
const LATE_OF_PERIOD: u64 = 32;
/// Least distance of an overflow whose alarm may be early: the handler is done long before it.
const MIN_DISTANCE: u64 = 65_536;

impl<B> HostEvent<B> {
    /// Returns the estimate for the handler that is about to begin. Returns `None` if it is to be measured, or if the
    /// event's counts are not estimated.
    pub fn estimate_next(&self) -> Option<Estimate> {
        self.handler.as_ref()?.next_estimate()
    }
}

impl<S: Source> Bank<S> {
    /// Sets which events count what no processor counts twice alike. Must be called before any counter counts.
    pub fn set_inexact(&mut self, inexact: &'static [Event]) {
        self.inexact = inexact;
    }

    /// Lets overflows of counters that sample at a rate wait for those that are near.
    pub fn gather(&mut self) {
        self.gathers = true;
    }

    /// Records that the kernel is interrupted, and is going to handle an overflow.
    pub(super) fn handlers_begin(&mut self) {
        for event in &mut self.events {
            if let Some(handler) = &mut event.handler {
                handler.interrupts(event.last_count);
            }
        }
    }

    /// Records that the kernel has stopped the counters in its handler, before any other access to them.
    pub fn handlers_stop(&mut self) {
        for event in &mut self.events {
            if let Some(handler) = &mut event.handler {
                handler.stops(event.last_count);
            }
        }
    }

    /// Records that the kernel has done something else first.
    pub(super) fn handlers_are_not_measured(&mut self) {
        self.events.iter_mut().filter_map(|event| event.handler.as_mut()).for_each(Handler::is_left);
    }

    /// Returns by how much an alarm at this distance may be early.
    pub(super) fn may_be_early(&self, index: usize, distance: u64) -> u64 {
        let event = &self.events[index];
        let is_estimated = event.handler.as_ref().is_some_and(|handler| handler.estimate().is_some());
        if is_estimated && distance >= MIN_DISTANCE && self.min_period == 1 && self.is_at_a_rate(event.users)
        {
            (distance / AHEAD_OF_PERIOD).min(MAX_AHEAD)
        } else {
            0
        }
    }

    /// Returns by how much the overflow of a counter may be reported late, so that those of others that are near are
    /// reported with it.
    pub(super) fn may_be_late(&self, counters: u64, counter: usize) -> u64 {
        let several = self.gathers && counters & self.running & self.interrupting & !(1 << counter) != 0;
        let period = self.counters[counter].rate.period;
        if several && period >= MIN_DISTANCE && self.min_period == 1 && self.is_at_a_rate(counters) {
            (period / LATE_OF_PERIOD).min(MAX_LATE)
        } else {
            0
        }
    }

    /// Returns whether all of these counters that run and interrupt sample at a rate. A counter that only counts could
    /// interrupt, too, but its overflow is far away.
    pub(super) fn is_at_a_rate(&self, counters: u64) -> bool {
        let only_counts = |counter: &Counter| {
            let overflow = |share: &Share| share.overflow.saturating_sub(share.mark);
            counter.overflows == 0 && counter.share.as_ref().is_some_and(|share| overflow(share) >= SOON)
        };
        let mut interrupting =
            members(counters & self.running & self.interrupting).map(|counter| &self.counters[counter]);
        interrupting.all(|counter| counter.is_at_a_rate() || only_counts(counter))
    }

    /// Returns the count up to which the counters of a host event are updated at its expired alarm: up to the last
    /// overflow of those for which the alarm is early by no more than it may be.
    pub(super) fn ahead_to_overflow(&self, index: usize, count: u64) -> u64 {
        let HostEvent { alarm, users, .. } = &self.events[index];
        if alarm.early == 0 || !self.is_at_a_rate(*users) {
            return count;
        }
        let overflow = |counter: usize| Some(self.counters[counter].share.as_ref()?.overflow);
        let is_near = |at: &u64| *at > count && *at - count <= alarm.early;
        let overflows = members(users & self.running & self.interrupting).filter_map(overflow);
        overflows.filter(is_near).max().unwrap_or(count)
    }

    /// Returns the next overflow after those that interrupt now, if the kernel handles these as it did before: the
    /// counters that have overflowed get the same period again. `count` is that of the last update.
    pub(super) fn predict(&self, index: usize, count: u64) -> Option<NextOverflow> {
        let event = &self.events[index];
        let Estimate { during, .. } = event.handler.as_ref()?.estimate()?;
        let at = |counter: usize| {
            let this = &self.counters[counter];
            let at = if self.overflowed & 1 << counter == 0 {
                this.share.as_ref()?.overflow
            } else {
                count.checked_sub(this.value)?.checked_add(this.rate.period)?
            };
            Some(NextOverflow { at: at.checked_add(during)?, counter })
        };
        let next = members(event.users & self.running & self.interrupting)
            .filter_map(at)
            .min_by_key(|next| next.at)?;
        (self.coalescing.predicts_stop() && self.may_be_early(index, next.at.saturating_sub(count)) > 0)
            .then_some(next)
    }

    /// Lets the alarm repeat for this overflow, if it is then early by about half of what it may be, or sets it so.
    pub(super) fn set_early_alarm(&mut self, index: usize, count: u64, next: NextOverflow) {
        let early = self.may_be_early(index, next.at.saturating_sub(count));
        let event = &mut self.events[index];
        let Armed { at, distance, kind, .. } = event.alarm;
        let again = at.saturating_add(distance);
        let is_about_half =
            next.at.checked_sub(again).is_some_and(|by| (early / 4..=early - early / 4).contains(&by));
        if is_about_half
            && event.load.may_repeat()
            && kind != AlarmKind::Repeating
            && distance >= MIN_REPEAT_DISTANCE
        {
            event.alarm = Armed {
                at: again,
                distance,
                counter_mask: 1 << next.counter,
                kind: AlarmKind::Repeating,
                early,
            };
        } else {
            self.arm(index, count, next, AlarmKind::OneShot);
        }
    }

    /// Updates the running counters of a host event to where the kernel is estimated to stop them in the handler that
    /// is about to begin. Returns the estimated count of the event there.
    pub(super) fn run_to_stop(&mut self, index: usize, mark: u64, before: u64) -> u64 {
        let (estimated, running) =
            (self.events[index].backing.estimated(), self.events[index].users & self.running);
        for counter in members(running) {
            self.advance(counter, mark.saturating_add(before), estimated);
        }
        let event = &mut self.events[index];
        if let Some(handler) = &mut event.handler {
            handler.is_estimated();
        }
        event.last_count.saturating_add(before)
    }

    /// Stops the running counters of a host event where the kernel was estimated to stop them.
    pub(super) fn stop_estimated(&mut self, index: usize, stop: u64) {
        let counters = self.events[index].users & self.running;
        for counter in members(counters) {
            if let Some(share) = &mut self.counters[counter].share {
                share.stop(stop);
            }
        }
        self.running &= !counters;
        self.counters_stopped(counters);
        if let Some(handler) = &mut self.events[index].handler {
            handler.has_stopped(stop);
        }
    }

    /// Starts the running counters of a host event where the kernel is estimated to have started them.
    pub(super) fn start_estimated(&mut self, index: usize) {
        let mask = self.mask();
        let event = &self.events[index];
        let Some(Estimate { during, .. }) = event.handler.as_ref().and_then(Handler::estimate) else {
            return;
        };
        for counter in members(event.users & self.running) {
            self.counters[counter].passes_over(during, mask);
        }
        if let Some(counter) = members(event.users & self.running).next()
            && let Some(Share { mark, .. }) = self.counters[counter].share
        {
            self.set_alarm(index, mark);
        }
    }

    /// Records for counters that have just been stopped by how much they are ahead.
    pub(super) fn stop_ahead(&mut self, stopped: u64) {
        for event in self.events.iter().filter(|event| event.handler.is_some()) {
            for counter in members(event.users & stopped) {
                if let Some(share) = &mut self.counters[counter].share {
                    share.stop(event.last_count);
                }
            }
        }
    }
}
