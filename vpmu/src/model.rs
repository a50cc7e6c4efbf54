//! What an access to a PMU register means, one file for each kind of PMU that a guest can be shown.

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

/// One vCPU's PMU, by its registers.
pub trait Model<S: Source> {
    /// The guest reads a register.
    fn read(&mut self, register: u32) -> Outcome;

    /// The guest writes one.
    fn write(&mut self, register: u32, value: u64) -> Outcome;

    /// What there is to say of it, in the guest's words.
    fn report(&mut self) -> Report;

    /// From now on does as the operator wants it to. What its registers hold stays as it is, and so do its counts.
    fn set_policy(&mut self, policy: &Policy);

    /// What is behind the registers.
    fn unit(&mut self) -> &mut Unit<S>;
}
