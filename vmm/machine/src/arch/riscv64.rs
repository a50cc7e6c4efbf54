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
mod look;
mod memory;
mod paging;
mod pmu;
mod register;
mod sbi;
mod state;

use std::arch::asm;

pub use self::aia::State as KvmState;
pub use self::board::{Board, Plan};
pub use self::exit::{ArchExit, KvmRun};
pub use self::fingerprint::Fingerprint;
pub use self::host::Processor;
pub use self::kvm::REQUIREMENTS;
pub use self::loader::{Entry, Format, Kernel, Nothing as SavedFormat};
pub use self::look::{AddressSpace, Look, Unwinder};
pub use self::pmu::{Choice, Emulated, Model, Offer, Pmu, Unavailable, VcpuPmu};
pub use self::state::VcpuState as KvmVcpuState;

/// Name of the instruction pointer.
pub const INSTRUCTION_POINTER: &str = "PC";

/// Reads the register `time`.
pub fn ticks() -> u64 {
    let now;
    // SAFETY: the instruction reads a register that Linux lets programs read, and has no other effect.
    unsafe { asm!("rdtime {}", out(reg) now, options(nomem, nostack)) };
    now
}
