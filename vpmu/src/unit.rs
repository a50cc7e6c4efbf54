//! What the PMUs of all vendors do: counters are configured one by one and stopped all at once, a status records which have
//! overflowed, and an overflow interrupts. A register model adds the registers.

mod rate_limiter;

use std::ops::RangeInclusive;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::bank::{Alarm, Bank};
use crate::event::{Event, Selection};
use crate::journal::Entry;
use crate::notice::Notice;
use crate::policy::Policy;
use crate::report::{Report, State, Statistics};
use crate::source::Source;
use rate_limiter::RateLimiter;

/// The configuration of one counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CounterConfig {
    /// The event that it counts, if any.
    pub selection: Option<Selection>,
    /// Its own enable bit. Global control, the freeze and the operator can stop it all the same.
    pub enabled: bool,
    /// Its overflow interrupts.
    pub interrupts: bool,
}

/// An interrupt for overflows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Interrupt {
    /// None is pending.
    None,
    /// One is to be injected.
    Asked,
    /// One waits for the rate limiter.
    Withheld {
        /// The counters whose overflow it is for.
        counters: u64,
        /// When it may be injected.
        until: Duration,
    },
}

/// The counters of a vCPU, numbered from 0. Sets of counters are masks.
pub struct Unit<S: Source> {
    bank: Bank<S>,
    configs: Vec<CounterConfig>,
    /// Counters whose own enable bit is set.
    enabled: u64,
    /// Counters whose overflow interrupts.
    interrupting: u64,
    /// Global control.
    control: u64,
    /// Global status: counters that have overflowed since software last cleared their bits.
    status: u64,
    interrupt: Interrupt,
    /// Limits the interrupts, if the policy has a limit.
    rate_limiter: Option<RateLimiter>,
    /// Number of interrupts asked for.
    interrupts: u64,
    /// Number of interrupts that had to wait for the rate limiter.
    withheld: u64,
    freezes: bool,
    frozen: bool,
    /// Counters that the operator has disabled.
    disabled: u64,
}

/// Whether the operator lets a guest use a counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Switch {
    /// The guest may use the counter.
    On,
    /// The counter stands still, whatever the guest does.
    Off,
}

impl<S: Source> Unit<S> {
    /// Creates `counters` counters of `width` bits: all zero, without an event, and enabled in global control.
    pub fn new(source: S, counters: usize, width: u32) -> Self {
        let bank = Bank::new(source, counters, width);
        let configs = vec![CounterConfig::default(); counters];
        Self {
            control: bank.all(),
            bank,
            configs,
            enabled: 0,
            interrupting: 0,
            status: 0,
            interrupt: Interrupt::None,
            rate_limiter: None,
            interrupts: 0,
            withheld: 0,
            freezes: false,
            frozen: false,
            disabled: 0,
        }
    }

    /// The mask of all counters.
    pub fn all(&self) -> u64 {
        self.bank.all()
    }

    /// Sets a counter's configuration.
    pub fn configure(&mut self, counter: usize, config: CounterConfig) {
        self.bank.kernel_accesses();
        // Overflows up to now belong to the old configuration.
        self.bank.run(self.running() & !(1 << counter));
        self.take_overflows();
        if self.configs[counter] != config {
            self.no_longer_withhold(1 << counter);
        }
        self.configs[counter] = config;
        for (set, belongs) in
            [(&mut self.enabled, config.enabled), (&mut self.interrupting, config.interrupts)]
        {
            *set = *set & !(1 << counter) | u64::from(belongs) << counter;
        }
        let alarm = if config.interrupts { Alarm::AtOverflow } else { Alarm::Off };
        self.bank.configure(counter, config.selection, alarm);
        self.bank.run(self.running());
    }

    /// Returns a counter's configuration.
    pub fn config(&self, counter: usize) -> CounterConfig {
        self.configs[counter]
    }

    /// Replaces the backing event without the guest seeing it. An interrupt that waits is still injected.
    pub fn select(&mut self, counter: usize, selection: Option<Selection>) {
        self.bank.select(counter, selection);
        self.configs[counter].selection = selection;
        self.take_overflows();
    }

    /// Reads a counter.
    pub fn read(&mut self, counter: usize) -> u64 {
        self.bank.kernel_accesses();
        let value = self.bank.read(counter);
        self.take_overflows();
        value
    }

    /// Returns a counter's value as of its last update. That is its current value if it stands still or is deferred.
    pub fn value(&self, counter: usize) -> u64 {
        self.bank.value(counter)
    }

    /// Writes a counter; bits beyond its width are dropped.
    pub fn write(&mut self, counter: usize, value: u64) {
        self.bank.kernel_accesses();
        self.bank.write(counter, value);
        self.take_overflows();
        self.no_longer_withhold(1 << counter);
    }

    /// Returns global control.
    pub fn control(&self) -> u64 {
        self.control
    }

    /// Sets global control; bits without a counter are dropped.
    pub fn set_control(&mut self, counters: u64) {
        self.control = counters & self.all();
        if self.running() != 0 {
            self.bank.kernel_accesses();
        } else if self.bank.kernel_stops() {
            return self.stop_for_handler();
        }
        self.run();
    }

    /// Stops all counters at the start of an interrupt handler. Overflows up to now belong to the interrupt being handled.
    fn stop_for_handler(&mut self) {
        self.bank.run(0);
        let overflowed = self.bank.take_overflowed();
        self.note_overflows(overflowed, false);
    }

    /// Reads global status, up to date. Counters that stand still were updated when they stopped.
    pub fn status(&mut self) -> u64 {
        self.bank.kernel_accesses();
        self.look_at_running();
        self.status
    }

    /// Clears bits of global status.
    pub fn clear_status(&mut self, counters: u64) {
        self.bank.kernel_accesses();
        self.look_at_running();
        self.status &= !counters;
        self.no_longer_withhold(counters);
    }

    /// Sets bits of global status, without an interrupt.
    pub fn set_status(&mut self, counters: u64) {
        self.status |= counters & self.all();
    }

    /// Sets whether an overflow that interrupts freezes all counters.
    pub fn freeze_at_interrupts(&mut self, freezes: bool) {
        self.freezes = freezes;
    }

    /// Returns whether the host has this event, even if others hold the hardware for it.
    pub fn can_count(&mut self, event: Event) -> bool {
        self.bank.can_count(event)
    }

    /// Returns whether all counters are frozen.
    pub fn is_frozen(&self) -> bool {
        self.frozen
    }

    /// Freezes or thaws all counters.
    pub fn set_frozen(&mut self, frozen: bool) {
        self.frozen = frozen;
        self.run();
    }

    /// Defers the changes that the guest's kernel makes while it handles an interrupt, until [`Self::commit`]. Returns false, and
    /// does nothing, if that would make a difference. All counters must have been updated since the guest ran.
    pub fn defer(&mut self) -> bool {
        let holds = !self.frozen && self.bank.defer();
        if holds {
            self.bank.kernel_is_not_observed();
        }
        holds
    }

    /// Ends a deferral, and updates all counters.
    pub fn commit(&mut self) {
        self.bank.commit();
        self.take_overflows();
    }

    /// Returns the values that a deferred counter can be written without a request to the host.
    pub fn free_values(&self, counter: usize) -> Option<RangeInclusive<u64>> {
        self.bank.free_values(counter)
    }

    /// Sets the policy.
    pub fn set_policy(&mut self, policy: &Policy) {
        self.bank.set_policy(policy);
        self.rate_limiter = policy.most_interrupts.map(RateLimiter::new);
        self.take_overflows();
    }

    /// Handles an expired alarm: updates all counters, unless `is_updated` says that this was done since the guest ran.
    pub fn alarm(&mut self, is_updated: bool) {
        self.bank.alarm(is_updated);
        self.take_overflows();
    }

    /// Polls for counters that have lost their hardware or got it back. Called by a timer.
    pub fn poll(&mut self) {
        self.bank.poll();
        self.take_overflows();
    }

    /// Releases the host's events that no counter has used since the last call.
    pub fn release_idle(&mut self) {
        self.bank.release_idle();
    }

    /// Returns whether a running counter has no hardware.
    pub fn is_starved(&self) -> bool {
        self.bank.is_starved()
    }

    /// Returns whether it holds events of the host.
    pub fn holds_counters(&self) -> bool {
        self.bank.is_backed()
    }

    /// Returns whether counters have lost their hardware or got it back since [`Self::forget_hardware_changed`].
    pub fn hardware_changed(&mut self) -> bool {
        self.bank.hardware().changed()
    }

    /// Clears [`Self::hardware_changed`].
    pub fn forget_hardware_changed(&mut self) {
        self.bank.hardware().forget_changed();
    }

    /// Takes the pending interrupt. Returns true if one is to be injected.
    pub fn take_interrupt(&mut self) -> bool {
        if let Interrupt::Withheld { counters, until } = self.interrupt
            && self.bank.now() >= until
        {
            self.interrupt = Interrupt::None;
            self.ask_for_interrupt(counters);
        }
        let asked = self.interrupt == Interrupt::Asked;
        if asked {
            self.interrupt = Interrupt::None;
        }
        asked
    }

    /// Records, after an alarm, whether the injected interrupt is taken at the next entry.
    pub fn interrupt_injected(&mut self, taken_at_next_entry: bool) {
        self.bank.interrupt_injected(taken_at_next_entry);
    }

    /// Returns the time at which the rate limiter lets a withheld interrupt through.
    pub fn withheld_until(&self) -> Option<Duration> {
        match self.interrupt {
            Interrupt::Withheld { until, .. } => Some(until),
            Interrupt::None | Interrupt::Asked => None,
        }
    }

    /// Returns the source's monotonic time.
    pub fn now(&self) -> Duration {
        self.bank.now()
    }

    /// Takes the notices for the operator.
    pub fn take_notices(&mut self) -> Vec<Notice> {
        self.bank.take_notices()
    }

    /// Records that the vCPU stands still until the counters have their hardware again.
    pub fn stands_still(&mut self) {
        self.bank.stands_still();
    }

    /// Retries scheduling. Returns true once every counter is on hardware.
    pub fn has_hardware_again(&mut self) -> bool {
        self.bank.has_hardware_again()
    }

    /// Adds a notice for the operator.
    pub fn tell(&mut self, notice: Notice) {
        self.bank.tell(notice);
    }

    /// Sets whether a journal is kept, for [`Self::take_entries`].
    pub fn keep_journal(&mut self, kept: bool) {
        self.bank.journal().keep(kept);
    }

    /// Takes the journal's entries.
    pub fn take_entries(&mut self) -> Vec<Entry> {
        self.bank.journal().take()
    }

    /// Enables or disables a counter for the guest. Returns false if there is no such counter. The host's event of a disabled
    /// counter is released like that of any counter that stands still.
    pub fn switch(&mut self, counter: usize, to: Switch) -> bool {
        if counter >= self.bank.size() {
            return false;
        }
        match to {
            Switch::On => self.disabled &= !(1 << counter),
            Switch::Off => self.disabled |= 1 << counter,
        }
        self.run();
        true
    }

    /// Reports all counters; `words` names an event.
    pub fn report(&mut self, words: impl Fn(Selection) -> String) -> Report {
        let mut counters: Vec<_> =
            (0..self.bank.size()).map(|counter| self.bank.report(counter, &words)).collect();
        for (_, report) in (0..).zip(&mut counters).filter(|(counter, _)| self.disabled & 1 << counter != 0) {
            report.state = State::Disabled;
        }
        self.take_overflows();
        let statistics =
            Statistics { interrupts: self.interrupts, withheld: self.withheld, ..self.bank.statistics() };
        Report { counters, statistics }
    }

    /// Updates all counters, and looks for expired alarms.
    pub fn look(&mut self) {
        self.bank.look_at_all();
        self.take_overflows();
    }

    fn look_at_running(&mut self) {
        self.bank.look();
        self.take_overflows();
    }

    /// Returns the counters that run.
    pub fn running(&self) -> u64 {
        if self.frozen { 0 } else { self.enabled & self.control & !self.disabled }
    }

    fn run(&mut self) {
        self.bank.run(self.running());
        self.take_overflows();
    }

    /// Sets the status for new overflows, and asks for an interrupt if one of these counters interrupts.
    fn take_overflows(&mut self) {
        let overflowed = self.bank.take_overflowed();
        if overflowed == 0 {
            return;
        }
        let counters = overflowed & self.interrupting;
        self.note_overflows(overflowed, counters != 0);
        if counters != 0 {
            self.ask_for_interrupt(counters);
        }
    }

    fn note_overflows(&mut self, overflowed: u64, interrupts: bool) {
        if overflowed != 0 {
            self.status |= overflowed;
            self.bank.journal().add(|| Entry::Overflowed { counters: overflowed, interrupts });
        }
    }

    /// Asks for one interrupt for all overflows before it. A withheld interrupt freezes nothing: the guest would not thaw it.
    fn ask_for_interrupt(&mut self, counters: u64) {
        match &mut self.interrupt {
            Interrupt::Asked => return,
            Interrupt::Withheld { counters: withheld, .. } => {
                *withheld |= counters;
                return;
            }
            Interrupt::None => {}
        }
        if let Some(limiter) = &mut self.rate_limiter
            && let Err(until) = limiter.take(self.bank.now())
        {
            self.interrupt = Interrupt::Withheld { counters, until };
            self.withheld += 1;
            return;
        }
        self.interrupt = Interrupt::Asked;
        self.interrupts += 1;
        if self.freezes && !self.frozen {
            self.set_frozen(true);
        }
    }

    /// Drops a withheld interrupt for counters that the guest has handled itself.
    fn no_longer_withhold(&mut self, counters: u64) {
        if let Interrupt::Withheld { counters: withheld, .. } = &mut self.interrupt {
            *withheld &= !counters;
            if *withheld == 0 {
                self.interrupt = Interrupt::None;
            }
        }
    }
}
