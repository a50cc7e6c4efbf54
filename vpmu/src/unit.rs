//! What every maker's PMU does: counters are configured one by one and stopped all at once, a status remembers which have
//! overflowed, and an overflow interrupts. The models are this, with registers.

mod allowance;
mod habit;

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::bank::{Alarm, Bank};
use crate::event::{Event, Selection};
use crate::journal::Entry;
use crate::notice::Notice;
use crate::policy::Policy;
use serde::{Deserialize, Serialize};

use crate::report::{Report, State, Statistics};
use crate::source::Source;
use allowance::Allowance;
use habit::Habit;

/// What one counter is told to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Setting {
    /// What it counts, if anything.
    pub selection: Option<Selection>,
    /// Whether it counts, as far as it has a say.
    pub enabled: bool,
    /// Whether its overflow interrupts.
    pub interrupts: bool,
}

/// An interrupt for overflows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Interrupt {
    /// There is no need for one.
    None,
    /// It is to be delivered.
    Asked,
    /// It has to wait.
    Withheld {
        /// For these counters.
        counters: u64,
        /// Until then.
        until: Duration,
    },
}

/// The counters of a vCPU, numbered from 0; sets of them are bit masks.
pub struct Unit<S: Source> {
    bank: Bank<S>,
    settings: Vec<Setting>,
    /// Those that are told to count.
    enabled: u64,
    /// Those whose overflow interrupts.
    interrupting: u64,
    /// Those that may run.
    control: u64,
    /// Those that have overflowed since software last cleared them.
    status: u64,
    interrupt: Interrupt,
    habit: Habit,
    /// What limits them, if anything does.
    allowance: Option<Allowance>,
    /// How often it has asked for one.
    interrupts: u64,
    /// How often it had to wait with that.
    withheld: u64,
    freezes: bool,
    frozen: bool,
    /// Those that the operator keeps from running.
    disabled: u64,
}

/// What an operator may do with a counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Switch {
    /// The guest may use it.
    On,
    /// It stands still, whatever the guest does with it.
    Off,
}

impl<S: Source> Unit<S> {
    /// So many counters of so many bits, all zero, which select nothing; all of them may run until [`Self::set_control`] says otherwise.
    pub fn new(source: S, counters: usize, width: u32) -> Self {
        let bank = Bank::new(source, counters, width);
        let settings = vec![Setting::default(); counters];
        Self {
            control: bank.all(),
            bank,
            settings,
            enabled: 0,
            interrupting: 0,
            status: 0,
            interrupt: Interrupt::None,
            habit: Habit::default(),
            allowance: None,
            interrupts: 0,
            withheld: 0,
            freezes: false,
            frozen: false,
            disabled: 0,
        }
    }

    /// All counters.
    pub fn all(&self) -> u64 {
        self.bank.all()
    }

    /// Tells a counter what to do.
    pub fn configure(&mut self, counter: usize, setting: Setting) {
        self.accessed();
        // Overflows up to now are those of the old setting.
        self.bank.run(self.running() & !(1 << counter));
        self.take_overflows();
        if self.settings[counter] != setting {
            self.no_longer_withhold(1 << counter);
        }
        self.settings[counter] = setting;
        for (set, belongs) in
            [(&mut self.enabled, setting.enabled), (&mut self.interrupting, setting.interrupts)]
        {
            *set = *set & !(1 << counter) | u64::from(belongs) << counter;
        }
        let alarm = if setting.interrupts { Alarm::AtOverflow } else { Alarm::Off };
        self.bank.configure(counter, setting.selection, alarm);
        self.bank.run(self.running());
    }

    /// What a counter is told to do.
    pub fn setting(&self, counter: usize) -> Setting {
        self.settings[counter]
    }

    /// Has something else count for a counter, of which the guest knows nothing: an interrupt that waits still comes.
    pub fn select(&mut self, counter: usize, selection: Option<Selection>) {
        self.bank.select(counter, selection);
        self.settings[counter].selection = selection;
        self.take_overflows();
    }

    /// What a counter shows.
    pub fn read(&mut self, counter: usize) -> u64 {
        self.accessed();
        let value = self.bank.read(counter);
        self.take_overflows();
        value
    }

    /// What it showed when it was last looked at: what it shows if it stands still, or is held.
    pub fn value(&self, counter: usize) -> u64 {
        self.bank.value(counter)
    }

    /// Sets what a counter shows, as far as it is wide.
    pub fn write(&mut self, counter: usize, value: u64) {
        self.accessed();
        self.bank.write(counter, value);
        self.take_overflows();
        self.no_longer_withhold(1 << counter);
    }

    /// The counters that may run.
    pub fn control(&self) -> u64 {
        self.control
    }

    /// Says which counters may run, of those that there are.
    pub fn set_control(&mut self, counters: u64) {
        self.control = counters & self.all();
        if self.running() != 0 {
            self.accessed();
        } else if self.habit.stops() {
            return self.stop_for_handler();
        }
        self.run();
    }

    /// Software does something with the counters. What was to wait until it stops them waits no longer.
    fn accessed(&mut self) {
        if self.habit.does_something_else() {
            self.bank.wait_no_longer();
        }
    }

    /// What has overflowed by now, the interrupt that is being handled is for.
    fn stop_for_handler(&mut self) {
        self.bank.run(0);
        let overflowed = self.bank.take_overflowed();
        self.note_overflows(overflowed, false);
    }

    /// The counters that have overflowed, by now. Those that stand still were looked at when they stopped.
    pub fn status(&mut self) -> u64 {
        self.accessed();
        self.look_at_running();
        self.status
    }

    /// Forgets overflows, up to now.
    pub fn clear_status(&mut self, counters: u64) {
        self.accessed();
        self.look_at_running();
        self.status &= !counters;
        self.no_longer_withhold(counters);
    }

    /// Has counters look as if they had overflowed; none interrupts.
    pub fn set_status(&mut self, counters: u64) {
        self.status |= counters & self.all();
    }

    /// Whether an overflow that interrupts freezes all counters, until they are thawed.
    pub fn freeze_at_interrupts(&mut self, freezes: bool) {
        self.freezes = freezes;
    }

    /// Whether the host has such an event at all, even if others hold the hardware for it.
    pub fn can_count(&mut self, event: Event) -> bool {
        self.bank.can_count(event)
    }

    /// Whether all counters stand still, whatever they are told.
    pub fn is_frozen(&self) -> bool {
        self.frozen
    }

    /// Freezes or thaws all counters.
    pub fn set_frozen(&mut self, frozen: bool) {
        self.frozen = frozen;
        self.run();
    }

    /// The guest's kernel is going to handle an interrupt, before any program goes on: what it does to the counters may be done
    /// later, as of now, if it makes no difference. Whether it does not. It was looked whether alarms have come.
    pub fn hold(&mut self) -> bool {
        let holds = !self.frozen && self.bank.hold();
        if holds {
            self.habit.is_not_seen();
        }
        holds
    }

    /// All of that is done, and it is looked which counters have overflowed.
    pub fn let_go(&mut self) {
        self.bank.let_go();
        self.take_overflows();
    }

    /// What a counter that is held can be set to without anything to do for the host.
    pub fn free_values(&self, counter: usize) -> Option<RangeInclusive<u64>> {
        self.bank.free_values(counter)
    }

    /// From now on does as the operator wants it to.
    pub fn obey(&mut self, policy: &Policy) {
        self.bank.obey(policy);
        self.allowance = policy.most_interrupts.map(Allowance::new);
        self.take_overflows();
    }

    /// An alarm has come: looks which counters have overflowed, unless that was done since the guest ran.
    pub fn alarm(&mut self, was_looked: bool) {
        self.habit.does_something_else();
        if !was_looked {
            self.bank.expect_stop(self.habit.stops_first());
            self.look();
            self.bank.expect_stop(false);
        }
        self.bank.alarm();
    }

    /// Some time has passed: counters that have lost their hardware are found out.
    pub fn beat(&mut self) {
        self.bank.beat();
        self.take_overflows();
    }

    /// Gives back to the host what no counter has used since this was last called.
    pub fn release_idle(&mut self) {
        self.bank.release_idle();
    }

    /// Whether a counter that is to run has no hardware.
    pub fn is_starved(&self) -> bool {
        self.bank.is_starved()
    }

    /// Whether it holds counters of the host.
    pub fn holds_counters(&self) -> bool {
        self.bank.is_backed()
    }

    /// Whether counters have lost their hardware, or got it back, since that was last forgotten.
    pub fn hardware_changed(&self) -> bool {
        self.bank.hardware_changed()
    }

    /// Forgets that, up to now.
    pub fn forget_hardware_changed(&mut self) {
        self.bank.forget_hardware_changed();
    }

    /// Whether it has asked for an interrupt since this was last asked.
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

    /// After an alarm: whether the guest handles an interrupt before anything else now.
    pub fn told(&mut self, at_once: bool) {
        if at_once {
            self.habit.called();
        } else {
            self.bank.wait_no_longer();
        }
    }

    /// For how long it has to wait with an interrupt, if it does. Nobody else says when that is over.
    pub fn withholds_interrupt(&self) -> Option<Duration> {
        match self.interrupt {
            Interrupt::Withheld { until, .. } => Some(until.saturating_sub(self.bank.now())),
            Interrupt::None | Interrupt::Asked => None,
        }
    }

    /// What the operator is to know since this was last asked.
    pub fn take_notices(&mut self) -> Vec<Notice> {
        self.bank.take_notices()
    }

    /// The vCPU stands still from now on, until the counters have their hardware again.
    pub fn stands_still(&mut self) {
        self.bank.stands_still();
    }

    /// Whether they have. It asks for that, too.
    pub fn has_hardware_again(&mut self) -> bool {
        self.bank.has_hardware_again()
    }

    /// Has the operator know of this, too.
    pub fn tell(&mut self, notice: Notice) {
        self.bank.tell(notice);
    }

    /// Begins to keep what happens to the counters, for [`Self::take_entries`], or no longer does.
    pub fn keep_journal(&mut self, kept: bool) {
        self.bank.journal().keep(kept);
    }

    /// What has happened to the counters since this was last asked.
    pub fn take_entries(&mut self) -> Vec<Entry> {
        self.bank.journal().take()
    }

    /// Disables a counter, or gives it back; whether there is one of this number. What counts for one that
    /// is disabled is given back to the host as that of others that stand still.
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

    /// What there is to say of the counters; `words` names what is counted.
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

    /// Looks whether alarms have come, and which counters have overflowed.
    pub fn look(&mut self) {
        self.bank.look_at_all();
        self.take_overflows();
    }

    fn look_at_running(&mut self) {
        self.bank.look();
        self.take_overflows();
    }

    /// Those that run.
    pub fn running(&self) -> u64 {
        if self.frozen { 0 } else { self.enabled & self.control & !self.disabled }
    }

    fn run(&mut self) {
        self.bank.run(self.running());
        self.take_overflows();
    }

    /// The status has a bit for every overflow; an interrupt comes for those whose counter asks for one.
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

    /// One interrupt is for all overflows before it. While one has to wait nothing freezes: the guest would not thaw it.
    fn ask_for_interrupt(&mut self, counters: u64) {
        match &mut self.interrupt {
            Interrupt::Asked => return,
            Interrupt::Withheld { counters: withheld, .. } => {
                *withheld |= counters;
                return;
            }
            Interrupt::None => {}
        }
        if let Some(allowance) = &mut self.allowance
            && let Err(until) = allowance.take(self.bank.now())
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

    /// The guest has seen to these counters itself: it does not expect an interrupt for them any more.
    fn no_longer_withhold(&mut self, counters: u64) {
        if let Interrupt::Withheld { counters: withheld, .. } = &mut self.interrupt {
            *withheld &= !counters;
            if *withheld == 0 {
                self.interrupt = Interrupt::None;
            }
        }
    }
}
