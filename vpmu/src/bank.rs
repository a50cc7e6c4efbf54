//! A vCPU's counters: their values, which of them run, and which have overflowed.
//!
//! The host event that backs a counter is shared by all counters that select the same, lives as long as one of them
//! does (while all counters stand still, until they start again), and never stops: a counter that stands still does not
//! add what its event counts meanwhile. So stopping, starting and reading a counter cost the host no more than a read
//! of the count. Only an alarm, for the next overflow, is a request to the host. It is made as seldom as possible: an
//! alarm that expires early does no harm, because an overflow is computed from the value.

mod arming;
mod coalescing;
mod completed;
mod counter;
mod deferral;
mod estimate;
pub mod exit_mark;
mod floor;
mod handler;
mod hardware;
mod host_event;
mod load;
mod next_alarm;
mod record;
mod reload;
mod report;
mod starvation;
#[cfg(test)]
mod tests;

use std::time::Duration;

use log::debug;

use crate::event::{Event, Selection};
use crate::journal::{Entry, Journal};
use crate::mask::{first, members};
use crate::notice::Notice;
use crate::policy::Policy;
use crate::source::{Backing, FAR, PolicyEffect, Source};
use coalescing::Coalescing;
use counter::Counter;
pub use deferral::Handled;
use floor::Floor;
use hardware::{Hardware, Reading};
use host_event::HostEvent;
use record::Record;

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
    /// Number of counters that are the guest's.
    guests: usize,
    counters: Vec<Counter>,
    /// The host events, each for all counters that select the same.
    events: Vec<HostEvent<S::Backing>>,
    running: u64,
    /// Counters with [`Alarm::AtOverflow`].
    interrupting: u64,
    /// Counters that have overflowed since [`Self::take_overflowed`].
    overflowed: u64,
    /// Counters that have stood still since the last call of [`Self::release_idle`].
    idle: u64,
    /// The policy's minimum distance between two overflows that interrupt.
    min_period: u64,
    /// The events that count all retired instructions.
    instruction_events: &'static [Event],
    /// The events that count what no processor counts twice alike.
    inexact: &'static [Event],
    /// Overflows at a rate that are near each other are reported together.
    gathers: bool,
    /// Alarms may be late by instructions that were completed.
    has_late_alarms: bool,
    floor: Floor,
    coalescing: Coalescing,
    hardware: Hardware,
    record: Record,
}

impl<S: Source> Bank<S> {
    /// Creates `counters` counters of `width` bits: all zero, without an event, standing still.
    ///
    /// # Panics
    /// If there are none or more than 63 counters, or their bits are none or more than 64.
    pub fn new(source: S, counters: usize, width: u32) -> Self {
        Self::with_companions(source, counters, 0, width)
    }

    /// As [`Self::new`], with so many companions after the counters. They are the VMM's own: nobody is told of them.
    pub fn with_companions(source: S, guests: usize, companions: usize, width: u32) -> Self {
        let counters = guests + companions;
        assert!((1..64).contains(&counters) && (1..=64).contains(&width));
        Self {
            source,
            width,
            guests,
            counters: (0..counters).map(|_| Counter::default()).collect(),
            events: Vec::with_capacity(counters),
            running: 0,
            interrupting: 0,
            overflowed: 0,
            idle: 0,
            min_period: 1,
            instruction_events: &[],
            inexact: &[],
            gathers: false,
            has_late_alarms: false,
            floor: Floor::default(),
            coalescing: Coalescing::default(),
            hardware: Hardware::default(),
            record: Record::default(),
        }
    }

    /// The mask of all counters.
    pub fn all(&self) -> u64 {
        first(self.counters.len())
    }

    /// Sets the event of a counter, which keeps its value.
    pub fn configure(&mut self, counter: usize, selection: Option<Selection>, alarm: Alarm) {
        let interrupts = alarm == Alarm::AtOverflow;
        let before = (self.counters[counter].selection, self.interrupts(counter));
        self.update_if_running(counter);
        if before != (selection, interrupts) {
            self.counters[counter].overflow_delayed = false;
        }
        self.reconfigure(counter, selection, interrupts);
    }

    /// Replaces the host event without the guest seeing it. A delayed overflow is still reported.
    pub fn replace_event(&mut self, counter: usize, selection: Option<Selection>) {
        if self.counters[counter].selection != selection {
            self.update_if_running(counter);
            self.reconfigure(counter, selection, self.interrupts(counter));
        }
    }

    /// Sets which counters run; all others stand still.
    pub fn run(&mut self, running: u64) {
        if running == 0 {
            self.coalescing.take_waiting();
        }
        let (stop, start) = (self.running & !running, running & !self.running);
        if stop != 0 {
            self.update(stop);
            self.stop_ahead(stop);
            self.counters_stopped(stop);
        }
        self.running = running;
        if start != 0 {
            self.resume(start);
        }
    }

    /// Updates and reads a counter.
    pub fn read(&mut self, counter: usize) -> u64 {
        self.update_if_running(counter);
        self.counters[counter].value
    }

    /// Returns a counter's value as of its last update.
    pub fn value(&self, counter: usize) -> u64 {
        self.counters[counter].value
    }

    /// Returns whether an overflow of a counter is delayed: it came too soon after the one before it.
    pub fn delays(&self, counter: usize) -> bool {
        self.counters[counter].overflow_delayed
    }

    /// Delays the report of an overflow of a counter that stands still.
    pub fn delay(&mut self, counter: usize) {
        self.counters[counter].overflow_delayed = true;
    }

    /// Writes a counter; bits beyond its width are dropped.
    pub fn write(&mut self, counter: usize, value: u64) {
        let mask = self.mask();
        let value = value & mask;
        // The alarm of a counter that stands still is set when it starts.
        let index = if self.runs(counter) { self.event_of(counter) } else { None };
        if let Some(deferred) = index.and_then(|index| self.events[index].deferred.as_mut()) {
            deferred.written = true;
            self.counters[counter].set(value, mask);
            return;
        }
        self.update_if_running(counter);
        self.counters[counter].set(value, mask);
        if let (Some(index), Some(share)) = (index, &self.counters[counter].share) {
            self.set_alarm(index, share.mark);
        }
    }

    /// Updates the running counters.
    pub fn update_running(&mut self) {
        self.update(self.running);
    }

    /// Updates all counters and looks for expired alarms. An alarm also expires while its counters stand still.
    pub fn update_all(&mut self) {
        self.update(self.all());
    }

    /// Polls for counters that have lost their hardware or got it back.
    pub fn poll(&mut self) {
        self.update_all();
        self.hardware.last_poll = self.source.now();
    }

    /// Releases the host events of counters that have stood still since the last call.
    pub fn release_idle(&mut self) {
        self.source.release_idle();
        let stand_still = self.backed() & !self.running;
        for counter in members(stand_still & self.idle) {
            debug!("counter {counter} stands still: released its host event");
            self.leave(counter);
        }
        self.idle = stand_still;
        // Nobody has wanted them for long: the source need not keep them.
        self.events.retain(|event| event.users != 0);
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
        self.update_all();
        self.min_period = policy.min_period.get().min(FAR);
        if self.source.set_policy(policy) == PolicyEffect::OnNewBackings {
            members(self.backed()).for_each(|counter| self.release(counter));
            self.resume(self.running);
        }
    }

    /// Records that the guest's kernel accesses the counters, other than by a stop. If that is its first access since
    /// an interrupt, alarms that wait for the stop are set.
    pub fn kernel_accesses(&mut self) {
        if self.coalescing.accessed() {
            self.handlers_are_not_measured();
            self.set_waiting_alarms();
        }
    }

    /// Records that the guest's kernel stops all counters. Returns true if that is its first access since an interrupt:
    /// overflows up to now belong to that interrupt.
    pub fn kernel_stops(&mut self) -> bool {
        self.coalescing.stopped()
    }

    /// Records that the guest's kernel will access the counters on the shared page, where its first access is not seen.
    pub fn kernel_is_not_observed(&mut self) {
        self.coalescing.not_observed();
    }

    /// Records whether the guest takes the interrupt of an alarm at the next entry. Called after every alarm, also if
    /// no interrupt was injected. If the guest does not take one, no alarm waits for the kernel.
    pub fn alarm_delivered(&mut self, at_next_entry: bool) {
        if at_next_entry {
            self.coalescing.interrupted();
            self.handlers_begin();
        } else {
            self.set_waiting_alarms();
        }
    }

    /// Updates all counters after an alarm has expired, unless that was done since the guest ran.
    pub fn alarm(&mut self, is_updated: bool) {
        // It may be the alarm of an event that nobody would set again.
        self.close_vacant();
        self.coalescing.accessed();
        if !is_updated {
            self.coalescing.alarm_begins();
            self.update_all();
            self.coalescing.alarm_ends();
        }
        self.record.alarm(self.overflows());
    }

    /// Sets the alarms that wait for a stop, because the guest was not interrupted or does something else first.
    fn set_waiting_alarms(&mut self) {
        if !self.coalescing.take_waiting() {
            return;
        }
        for index in 0..self.events.len() {
            // The alarm of a deferred event is set by `commit`.
            if self.events[index].deferred.is_some() {
                continue;
            }
            let reading = self.count(index);
            if reading.recovered {
                self.replace_alarm(index, reading.count);
            } else {
                self.set_alarm(index, reading.count);
            }
        }
    }

    /// Returns whether counters have overflowed since they were last taken.
    #[inline]
    pub fn has_overflowed(&self) -> bool {
        self.overflowed != 0
    }

    /// Takes the counters that have overflowed, as of their last updates.
    pub fn take_overflowed(&mut self) -> u64 {
        std::mem::take(&mut self.overflowed)
    }

    /// Takes the notices for the operator.
    pub fn take_notices(&mut self) -> Vec<Notice> {
        self.record.take_notices()
    }

    /// The journal.
    pub fn journal(&mut self) -> &mut Journal {
        &mut self.record.journal
    }

    /// What is known of the counters' hardware.
    pub fn hardware(&mut self) -> &mut Hardware {
        &mut self.hardware
    }

    fn mask(&self) -> u64 {
        u64::MAX >> (u64::BITS - self.width)
    }

    /// Adds a notice for the operator. Returns false if it was dropped because there were too many of late.
    pub fn add_notice(&mut self, notice: Notice) -> bool {
        if notice.counter().is_some_and(|counter| counter >= self.guests) {
            return true;
        }
        self.record.add_notice(notice, self.source.now())
    }

    fn reconfigure(&mut self, counter: usize, selection: Option<Selection>, interrupts: bool) {
        let is_changed =
            (self.counters[counter].selection, self.interrupts(counter)) != (selection, interrupts);
        if is_changed && counter < self.guests {
            self.record.journal.add(|| Entry::Configured { counter, selection, interrupts });
        }
        self.interrupting = self.interrupting & !(1 << counter) | u64::from(interrupts) << counter;
        if self.counters[counter].selection != selection {
            // While all stand still, as at a switch of tasks, others may come to select the same.
            self.leave(counter);
            if self.running != 0 {
                self.close_vacant();
            }
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

    fn update_if_running(&mut self, counter: usize) {
        if self.runs(counter) {
            self.update(1 << counter);
        }
    }

    fn update(&mut self, counters: u64) {
        for index in 0..self.events.len() {
            let HostEvent { users, deferred, .. } = &self.events[index];
            if users & counters != 0 && deferred.is_none() {
                let reading = self.count(index);
                self.update_event_users(index, &reading, counters & self.running);
            }
        }
    }

    /// Updates the given running counters of a host event; all of them if its alarm has expired, so that the next alarm
    /// can be set. Returns true if an alarm was set.
    fn update_event_users(&mut self, index: usize, reading: &Reading, counters: u64) -> bool {
        let HostEvent { backing, users, alarm, .. } = &mut self.events[index];
        let (all, estimated, due) = (*users & self.running, backing.estimated(), reading.count >= alarm.at);
        let is_early = backing.takes_early_expiry() && !due;
        let count = if due { self.ahead_to_overflow(index, reading.count) } else { reading.count };
        if due {
            self.expire(index, count);
        }
        let these = if due { all } else { all & counters };
        let interrupts =
            members(these).fold(false, |any, counter| any | self.advance(counter, count, estimated));
        if due {
            self.renew_alarm(index, count, interrupts);
        } else if reading.recovered || is_early {
            self.replace_alarm(index, reading.count);
        }
        due || reading.recovered || is_early
    }

    /// Adds what was counted while a counter ran. Returns true if it has overflowed and interrupts.
    fn advance(&mut self, counter: usize, count: u64, estimated: u64) -> bool {
        let interrupts = self.interrupts(counter);
        let mask = self.mask();
        let this = &mut self.counters[counter];
        let at = this.share.as_ref().map_or(u64::MAX, |share| share.overflow);
        let has_overflowed = this.advance(count, estimated, mask);
        if !has_overflowed && !this.overflow_delayed {
            return false;
        }
        let Some(share) = &mut this.share else { return false };
        self.record.statistics.clamps += u64::from(has_overflowed && interrupts && at < share.earliest);
        let is_reported = count >= share.earliest || !interrupts;
        this.overflow_delayed = !is_reported;
        if is_reported {
            this.overflows += 1;
            // An overflow that does not interrupt may be found late.
            let reported = if interrupts { count } else { at.min(count) };
            share.earliest = reported.saturating_add(self.min_period);
            self.overflowed |= 1 << counter;
        }
        is_reported && interrupts
    }
}
