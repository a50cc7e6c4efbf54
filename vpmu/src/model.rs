//! Register models: what an access to a PMU register does. There is one file for each kind of PMU that a guest can see.

pub mod amd;
pub mod intel;
pub mod none;
pub(crate) mod page;
pub mod riscv;
mod select;
#[cfg(test)]
pub(crate) mod testing;

use crate::event::{Event, GenericEvent};
use crate::outcome::Outcome;
use crate::policy::Policy;
use crate::report::Report;
use crate::source::Source;
use crate::state::{Mismatch, Registers, UnitState};
use crate::unit::Unit;
use riscv::Riscv;

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

    /// Returns the model itself, if it is RISC-V's: its guests also make calls.
    fn riscv(&mut self) -> Option<&mut Riscv<S>> {
        None
    }

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
