//! Register models: what an access to a PMU register does. There is one file for each kind of PMU that a guest can see.

pub mod amd;
pub mod intel;
pub mod none;
pub mod riscv;
mod select;
#[cfg(test)]
pub(crate) mod testing;

use crate::event::{Event, GenericEvent};
use crate::outcome::Outcome;
use crate::policy::Policy;
use crate::report::Report;
use crate::sbi_page;
use crate::source::Source;
use crate::state::{Mismatch, Registers, UnitState};
use crate::unit::Unit;
use riscv::sbi::Answer;

/// The registers of one vCPU's PMU.
pub(crate) trait Model<S: Source> {
    /// Handles the guest's read of a register: an MSR on x86, a CSR on RISC-V.
    fn read(&mut self, register: u32) -> Outcome;

    /// Handles the guest's write to a register.
    fn write(&mut self, register: u32, value: u64) -> Outcome;

    /// Reports the state of the PMU, with the guest's names for events.
    fn report(&mut self) -> Report;

    /// Sets the policy. Registers and counts keep their values.
    fn set_policy(&mut self, policy: &Policy);

    /// Handles a call of the SBI's PMU extension.
    fn call(&mut self, _function: u64, _arguments: [u64; 6]) -> Answer {
        Answer::NOT_SUPPORTED
    }

    /// Returns whether an event of the SBI's can be counted.
    fn has_event(&mut self, _index: u64, _data: u64) -> bool {
        false
    }

    /// Shares a page with the guest's kernel, for a PMU whose registers are accessed by SBI calls.
    fn share_page(&mut self, _page: sbi_page::Shared) {}

    /// Applies the calls that were made on the page, and withdraws the page until the next entry. Returns true if all
    /// counters were updated.
    fn apply_page(&mut self) -> bool {
        false
    }

    /// Prepares [`Self::activate_page`] after an exit, before the pending interrupt is taken.
    fn prepare_page(&mut self) {}

    /// Makes the page available for the next entry, if this exit permits that. `is_interrupted` says that an overflow
    /// interrupt was injected.
    fn activate_page(&mut self, _is_interrupted: bool) {}

    /// Returns the events that count all retired instructions.
    fn instruction_events(&self) -> &'static [Event] {
        &[Event::Generic(GenericEvent::Instructions)]
    }

    /// Returns the registers that the model keeps itself. The unit's state was saved before.
    fn save(&mut self) -> Registers;

    /// Returns an error unless this model can have had these registers.
    fn check(&self, registers: &Registers) -> Result<(), Mismatch>;

    /// Restores registers that [`Self::check`] has passed, and the unit's state.
    fn restore(&mut self, registers: &Registers, unit: &UnitState);

    /// Returns the events that count what no processor counts twice alike, and that are sampled at rates.
    fn inexact(&self) -> &'static [Event] {
        &[]
    }

    /// Returns the counters behind the registers.
    fn unit(&mut self) -> &mut Unit<S>;
}
