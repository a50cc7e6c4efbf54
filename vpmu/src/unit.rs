//! The part that all PMU models share: counters are configured one by one and stopped all at once, a status records
//! which have overflowed, and an overflow interrupts. A register model adds the registers.

mod branches;
mod rate_limiter;
mod state;

use std::num::NonZeroU64;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::bank::exit_mark::Marked;
use crate::bank::{Alarm, Bank, Handled};
use crate::event::Selection;
use crate::journal::Entry;
use crate::mask::first;
use crate::policy::Policy;
use crate::report::{Report, State, Statistics};
use crate::source::Source;
use branches::Branches;
use rate_limiter::RateLimiter;

/// The configuration of one counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CounterConfig {
    /// The event that it counts, if any.
    pub selection: Option<Selection>,
    /// Its own enable bit. Global control, the freeze and the operator can stop it all the same.
    pub enabled: bool,
    /// Overflow interrupt enabled.
    pub interrupts: bool,
    /// The code of the event, if it has the flag of event-based branches.
    pub branches: Option<NonZeroU64>,
}

/// An interrupt for overflows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Interrupt {
    /// None is pending.
    None,
    /// One is to be injected.
    Pending,
    /// One waits for the rate limiter.
    Throttled {
        /// The counters whose overflow it is for.
        counters: u64,
        /// When it may be injected.
        until: Duration,
    },
}

/// The counters of a vCPU, numbered from 0. Sets of counters are masks.
pub struct Unit<S: Source> {
    /// The counters' values and host events. What may find overflows is called through the unit, which takes them.
    pub bank: Bank<S>,
    configs: Vec<CounterConfig>,
    /// Counters whose own enable bit is set.
    enabled: u64,
    /// Counters with the overflow interrupt enabled.
    interrupting: u64,
    /// Global control.
    control: u64,
    /// Global status: counters that have overflowed since software last cleared their bits.
    status: u64,
    interrupt: Interrupt,
    /// Limits the interrupts, if the policy has a limit.
    rate_limiter: Option<RateLimiter>,
    /// Number of interrupts raised.
    interrupts: u64,
    /// Number of interrupts that had to wait for the rate limiter.
    withheld: u64,
    freezes: bool,
    frozen: bool,
    /// Counters that the operator has disabled.
    disabled: u64,
    branches: Branches,
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
        Self::with_bank(Bank::new(source, counters, width), counters)
    }

    /// As [`Self::new`], with a companion for each counter, which event-based branches need.
    pub fn with_companions(source: S, counters: usize, width: u32) -> Self {
        Self::with_bank(Bank::with_companions(source, counters, counters, width), counters)
    }

    fn with_bank(bank: Bank<S>, counters: usize) -> Self {
        let configs = vec![CounterConfig::default(); counters];
        Self {
            control: first(counters),
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
            branches: Branches::default(),
        }
    }

    /// The mask of all counters.
    pub fn all(&self) -> u64 {
        first(self.size())
    }

    fn size(&self) -> usize {
        self.configs.len()
    }

    /// Sets a counter's configuration.
    pub fn configure(&mut self, counter: usize, config: CounterConfig) {
        self.bank.kernel_accesses();
        // Overflows up to now belong to the old configuration.
        self.run_only(self.running() & !(1 << counter));
        self.take_overflows();
        if self.configs[counter] != config {
            self.cancel_throttled(1 << counter);
        }
        self.flag(counter, config.branches, config.selection);
        self.configs[counter] = config;
        for (set, belongs) in
            [(&mut self.enabled, config.enabled), (&mut self.interrupting, config.interrupts)]
        {
            *set = *set & !(1 << counter) | u64::from(belongs) << counter;
        }
        let alarm = if config.interrupts { Alarm::AtOverflow } else { Alarm::Off };
        self.bank.configure(counter, config.selection, alarm);
        self.run_only(self.running());
    }

    /// Returns a counter's configuration.
    pub fn config(&self, counter: usize) -> CounterConfig {
        self.configs[counter]
    }

    /// Replaces the backing event without the guest seeing it. An interrupt that waits is still injected.
    pub fn replace_event(&mut self, counter: usize, config: CounterConfig) {
        let CounterConfig { selection, branches, .. } = config;
        self.bank.replace_event(counter, selection);
        self.flag(counter, branches, selection);
        (self.configs[counter].selection, self.configs[counter].branches) = (selection, branches);
        self.run();
    }

    /// Reads a counter.
    pub fn read(&mut self, counter: usize) -> u64 {
        self.bank.kernel_accesses();
        let value = self.bank.read(counter);
        self.take_overflows();
        value
    }

    /// Writes a counter; bits beyond its width are dropped.
    pub fn write(&mut self, counter: usize, value: u64) {
        self.bank.kernel_accesses();
        self.bank.write(counter, value);
        self.take_overflows();
        self.cancel_throttled(1 << counter);
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

    /// Stops all counters at the start of an interrupt handler. Overflows up to now belong to the interrupt being
    /// handled.
    fn stop_for_handler(&mut self) {
        self.run_only(0);
        self.bank.handlers_stop();
        let overflowed = self.take_overflowed();
        self.note_overflows(overflowed, false);
    }

    /// Reads global status, up to date. Counters that stand still were updated when they stopped.
    pub fn status(&mut self) -> u64 {
        self.bank.kernel_accesses();
        self.update_running();
        self.status
    }

    /// Returns global status as of the last update.
    pub fn known_status(&self) -> u64 {
        self.status
    }

    /// Clears bits of global status.
    pub fn clear_status(&mut self, counters: u64) {
        self.bank.kernel_accesses();
        self.update_running();
        self.status &= !counters;
        self.cancel_throttled(counters);
    }

    /// Sets bits of global status, without an interrupt.
    pub fn set_status(&mut self, counters: u64) {
        self.status |= counters & self.all();
    }

    /// Sets whether an overflow interrupt freezes all counters.
    pub fn set_freeze_on_pmi(&mut self, freezes: bool) {
        self.freezes = freezes;
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

    /// Defers the changes that the guest's kernel makes while it handles an interrupt, until [`Self::commit`]. Returns
    /// false, and does nothing, if that would make a difference. All counters must have been updated since the guest
    /// ran.
    pub fn defer(&mut self) -> bool {
        let defers = !self.frozen && !self.branches.are_started() && self.bank.defer();
        if defers {
            self.bank.kernel_is_not_observed();
            // Overflows until the kernel stops the counters belong to the interrupt.
            let overflowed = self.take_overflowed();
            self.note_overflows(overflowed, false);
        }
        defers
    }

    /// Ends a deferral, and updates all counters.
    pub fn commit(&mut self, handled: Handled) {
        self.bank.commit(handled);
        self.take_overflows();
    }

    /// Updates all counters of user mode, if `with_time` also those of time in the kernel, and marks their counts until
    /// the next exit. Returns the counters whose changes can then be made as of now.
    pub fn mark_exit(&mut self, with_time: bool) -> Marked {
        let marked = self.bank.mark_exit(with_time);
        self.take_overflows();
        marked
    }

    /// Sets the policy.
    pub fn set_policy(&mut self, policy: &Policy) {
        self.bank.set_policy(policy);
        self.rate_limiter = policy.max_interrupts_per_second.map(RateLimiter::new);
        self.take_overflows();
    }

    /// Handles an expired alarm: updates all counters, unless `is_updated` says that this was done since the guest ran.
    pub fn alarm(&mut self, is_updated: bool) {
        self.bank.alarm(is_updated);
        self.take_overflows();
    }

    /// Finds overflows at instructions that were completed.
    pub fn settle_completed(&mut self) {
        if self.bank.settle_completed() {
            self.take_overflows();
        }
    }

    /// Polls for counters that have lost their hardware or got it back. Called by a timer.
    pub fn poll(&mut self) {
        self.bank.poll();
        self.take_overflows();
    }

    /// Returns whether an interrupt is to be injected, unless the rate limiter withholds it.
    pub fn is_interrupt_pending(&self) -> bool {
        self.interrupt == Interrupt::Pending
    }

    /// Takes the pending interrupt. Returns true if one is to be injected.
    pub fn take_interrupt(&mut self) -> bool {
        if let Interrupt::Throttled { counters, until } = self.interrupt
            && self.bank.now() >= until
        {
            self.interrupt = Interrupt::None;
            self.raise_interrupt(counters);
        }
        let is_pending = self.interrupt == Interrupt::Pending;
        if is_pending {
            self.interrupt = Interrupt::None;
        }
        is_pending
    }

    /// Returns the time at which the rate limiter permits a throttled interrupt or branch.
    pub fn throttled_until(&self) -> Option<Duration> {
        let of_interrupt = match self.interrupt {
            Interrupt::Throttled { until, .. } => Some(until),
            Interrupt::None | Interrupt::Pending => None,
        };
        match self.branches.throttled_until() {
            None => of_interrupt,
            Some(until) => Some(of_interrupt.map_or(until, |other| other.min(until))),
        }
    }

    /// Enables or disables a counter for the guest. Returns false if there is no such counter. The host's event of a
    /// disabled counter is released like that of any counter that stands still.
    pub fn set_counter_switch(&mut self, counter: usize, to: Switch) -> bool {
        if counter >= self.size() {
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
            (0..self.size()).map(|counter| self.bank.report(counter, &words)).collect();
        for (_, report) in (0..).zip(&mut counters).filter(|(counter, _)| self.disabled & 1 << counter != 0) {
            report.state = State::Disabled;
        }
        self.take_overflows();
        let statistics =
            Statistics { interrupts: self.interrupts, withheld: self.withheld, ..self.bank.statistics() };
        Report { counters, statistics }
    }

    /// Updates all counters, and looks for expired alarms.
    pub fn update_all(&mut self) {
        self.bank.update_all();
        self.take_overflows();
    }

    fn update_running(&mut self) {
        self.bank.update_running();
        self.take_overflows();
    }

    /// Returns the counters that run.
    pub fn running(&self) -> u64 {
        if self.frozen { 0 } else { self.enabled & self.control & !self.disabled }
    }

    fn run(&mut self) {
        self.run_only(self.running());
        self.take_overflows();
    }

    /// Sets which counters of the bank run: these and their companions.
    fn run_only(&mut self, counters: u64) {
        let companions = counters & self.branches.started();
        self.bank.run(counters | companions << self.size());
    }

    /// Sets the status for new overflows, and raises an interrupt if one of these counters interrupts.
    #[inline]
    fn take_overflows(&mut self) {
        if self.bank.has_overflowed() {
            self.take_new_overflows();
        }
    }

    fn take_new_overflows(&mut self) {
        let overflowed = self.take_overflowed();
        if overflowed == 0 {
            return;
        }
        let counters = overflowed & self.interrupting;
        self.note_overflows(overflowed, counters != 0);
        if counters != 0 {
            self.raise_interrupt(counters);
        }
    }

    /// Takes the overflows of the guest's counters, and leaves those of their companions to [`Self::serve_branches`].
    fn take_overflowed(&mut self) -> u64 {
        let overflowed = self.bank.take_overflowed();
        if overflowed > self.all() {
            self.branches.overflow(overflowed >> self.size());
        }
        overflowed & self.all()
    }

    fn note_overflows(&mut self, overflowed: u64, interrupts: bool) {
        if overflowed != 0 {
            self.status |= overflowed;
            self.bank.journal().add(|| Entry::Overflowed { counters: overflowed, interrupts });
        }
    }

    /// Raises one interrupt for all overflows before it. A throttled interrupt freezes nothing: the guest would not
    /// thaw it.
    fn raise_interrupt(&mut self, counters: u64) {
        match &mut self.interrupt {
            Interrupt::Pending => return,
            Interrupt::Throttled { counters: throttled, .. } => {
                *throttled |= counters;
                return;
            }
            Interrupt::None => {}
        }
        if let Some(limiter) = &mut self.rate_limiter
            && let Err(until) = limiter.take(self.bank.now())
        {
            self.interrupt = Interrupt::Throttled { counters, until };
            self.withheld += 1;
            return;
        }
        self.interrupt = Interrupt::Pending;
        self.interrupts += 1;
        if self.freezes && !self.frozen {
            self.set_frozen(true);
        }
    }

    /// Drops a throttled interrupt for counters that the guest has handled itself.
    fn cancel_throttled(&mut self, counters: u64) {
        if let Interrupt::Throttled { counters: throttled, .. } = &mut self.interrupt {
            *throttled &= !counters;
            if *throttled == 0 {
                self.interrupt = Interrupt::None;
            }
        }
    }
}
