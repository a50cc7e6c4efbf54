//! The x86-64 architecture: PCs with an AMD or Intel processor.

mod acpi;
mod board;
mod coalescing;
mod cpuid;
mod cr;
mod exit;
mod fingerprint;
mod firmware;
mod host;
mod kvm;
mod layout;
mod loader;
mod memory;
mod msr;
mod paging;
mod pmu;
mod registers;
mod state;
mod vmgenid;

use crate::architecture::{Architecture, KvmRequirements};

/// A PC with AMD or Intel processors.
pub struct X86_64;

impl Architecture for X86_64 {
    const INSTRUCTION_POINTER: &'static str = "RIP";
    const KVM: KvmRequirements = kvm::REQUIREMENTS;
    type Model = pmu::Model;
    type Format = loader::Format;
    type Board = board::Board;
    type Run = exit::KvmRun;

    fn ticks() -> u64 {
        // SAFETY: every processor that runs guests has a time-stamp counter, and Linux lets programs read it.
        unsafe { std::arch::x86_64::_rdtsc() }
    }
}
