//! 64-bit RISC-V processors with the hypervisor extension.

mod aia;
mod board;
mod exit;
mod fdt;
mod fingerprint;
mod host;
mod isa;
mod kvm;
mod layout;
mod loader;
mod memory;
mod pmu;
mod register;
mod sbi;
mod state;

use std::arch::asm;

use crate::architecture::{Architecture, KvmRequirements};

/// A machine with 64-bit RISC-V processors.
pub struct Riscv64;

impl Architecture for Riscv64 {
    const INSTRUCTION_POINTER: &'static str = "PC";
    const KVM: KvmRequirements = kvm::REQUIREMENTS;
    type Model = pmu::Model;
    type Format = loader::Format;
    type Board = board::Board;
    type Run = exit::KvmRun;

    fn ticks() -> u64 {
        let now;
        // SAFETY: the instruction reads a register that Linux lets programs read, and has no other effect.
        unsafe { asm!("rdtime {}", out(reg) now, options(nomem, nostack)) };
        now
    }
}
