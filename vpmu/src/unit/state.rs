//! Saves and restores the part of a PMU's state that all models share.

use super::{Interrupt, Unit};
use crate::mask::members;
use crate::source::Source;
use crate::state::{InterruptState, Mismatch, UnitState, check};

impl<S: Source> Unit<S> {
    /// Returns the state as of now.
    pub fn save(&mut self) -> UnitState {
        self.update_all();
        let now = self.bank.now();
        let counters = 0..self.size();
        UnitState {
            values: counters.clone().map(|counter| self.bank.value(counter)).collect(),
            delayed: counters.fold(0, |set, counter| set | u64::from(self.bank.delays(counter)) << counter),
            control: self.control,
            status: self.status,
            frozen: self.frozen,
            disabled: self.disabled,
            interrupt: match self.interrupt {
                Interrupt::None => InterruptState::None,
                Interrupt::Pending => InterruptState::Pending,
                Interrupt::Throttled { counters, until } => {
                    InterruptState::Throttled { counters, wait: until.saturating_sub(now) }
                }
            },
            spent_ahead: self.rate_limiter.map(|limiter| limiter.spent_ahead(now)).unwrap_or_default(),
            branches: self.save_branches(),
        }
    }

    /// Returns an error unless this unit can have been in that state.
    pub fn check(&self, state: &UnitState) -> Result<(), Mismatch> {
        let UnitState { values, delayed, control, status, disabled, interrupt, branches, .. } = state;
        if values.len() != self.size() {
            return Err(Mismatch::Shape);
        }
        let waiting = match interrupt {
            InterruptState::Throttled { counters, .. } => *counters,
            InterruptState::None | InterruptState::Pending => 0,
        };
        check(branches.iter().all(|branch| branch.counter < values.len()), "event-based branches")?;
        let sets = [
            (*delayed, "delayed overflows"),
            (*control, "global control"),
            (*status, "global status"),
            (*disabled, "disabled counters"),
            (waiting, "interrupt"),
        ];
        sets.into_iter().try_for_each(|(set, what)| check(set & !self.all() == 0, what))
    }

    /// Stops all counters, so that a model can configure them for [`Self::resume`].
    pub fn halt(&mut self) {
        self.set_control(0);
        self.set_frozen(false);
    }

    /// Restores a state that [`Self::check`] has passed, after the model has configured the counters of a unit that was
    /// halted. Counters start that ran when the state was saved.
    pub fn resume(&mut self, state: &UnitState) {
        let now = self.bank.now();
        for (counter, value) in state.values.iter().enumerate() {
            self.bank.write(counter, *value);
        }
        members(state.delayed).for_each(|counter| self.bank.delay(counter));
        (self.status, self.frozen, self.disabled) = (state.status, state.frozen, state.disabled);
        self.interrupt = match state.interrupt {
            InterruptState::None => Interrupt::None,
            InterruptState::Pending => Interrupt::Pending,
            InterruptState::Throttled { counters, wait } => {
                Interrupt::Throttled { counters, until: now.saturating_add(wait) }
            }
        };
        if let Some(limiter) = &mut self.rate_limiter {
            limiter.spend_ahead(now, state.spent_ahead);
        }
        self.resume_branches(&state.branches);
        self.set_control(state.control);
    }
}
