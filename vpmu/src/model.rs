//! Register models: what an access to a PMU register does. There is one file for each kind of PMU that a guest can see.

pub mod amd;
pub mod intel;
pub mod none;
pub mod riscv;
mod select;
#[cfg(test)]
pub mod testing;

use crate::Outcome;
use crate::policy::Policy;
use crate::report::Report;
use crate::source::Source;
use crate::unit::Unit;

/// The registers of one vCPU's PMU.
pub trait Model<S: Source> {
    /// Handles the guest's read of a register: an MSR on x86, a CSR on RISC-V.
    fn read(&mut self, register: u32) -> Outcome;

    /// Handles the guest's write to a register.
    fn write(&mut self, register: u32, value: u64) -> Outcome;

    /// Reports the state of the PMU, with the guest's names for events.
    fn report(&mut self) -> Report;

    /// Sets the policy. Registers and counts keep their values.
    fn set_policy(&mut self, policy: &Policy);

    /// Returns the counters behind the registers.
    fn unit(&mut self) -> &mut Unit<S>;
}
