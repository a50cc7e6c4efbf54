//! What an access to a PMU register means, one file for each kind of PMU that a guest can be shown.

pub mod amd;
pub mod intel;
pub mod none;
pub mod riscv;
mod select;
#[cfg(test)]
pub(crate) mod testing;

use crate::Outcome;
use crate::policy::Policy;
use crate::report::Report;
use crate::source::Source;
use crate::unit::Unit;
use riscv::Answer;

/// One vCPU's PMU, by its registers.
pub(crate) trait Model<S: Source> {
    /// The guest reads a register.
    fn read(&mut self, register: u32) -> Outcome;

    /// The guest writes one.
    fn write(&mut self, register: u32, value: u64) -> Outcome;

    /// What there is to say of it, in the guest's words.
    fn report(&mut self) -> Report;

    /// From now on does as the operator wants it to. What its registers hold stays as it is, and so do its counts.
    fn set_policy(&mut self, policy: &Policy);

    /// Handles a call of the SBI's PMU extension.
    fn call(&mut self, _function: u64, _arguments: [u64; 6]) -> Answer {
        Answer::NOT_SUPPORTED
    }

    /// Returns whether an event of the SBI's can be counted.
    fn has_event(&mut self, _index: u64, _data: u64) -> bool {
        false
    }

    /// What is behind the registers.
    fn unit(&mut self) -> &mut Unit<S>;
}
