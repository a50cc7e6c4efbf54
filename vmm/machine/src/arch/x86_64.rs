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
mod look;
mod memory;
mod msr;
mod orc;
mod paging;
mod pmu;
mod registers;
mod state;
mod stored;
mod vmgenid;

pub use self::board::{Board, Plan};
pub use self::exit::{ArchExit, KvmRun};
pub use self::fingerprint::Fingerprint;
pub use self::host::Processor;
pub use self::kvm::REQUIREMENTS;
pub use self::loader::{Entry, Format, Kernel, SavedLinux as SavedFormat};
pub use self::look::{AddressSpace, Look};
pub use self::orc::Unwinder;
pub use self::pmu::{Choice, Emulated, Model, Offer, Pmu, Unavailable, VcpuPmu};
pub use self::state::{MachineState as KvmState, VcpuState as KvmVcpuState};

/// Name of the instruction pointer.
pub const INSTRUCTION_POINTER: &str = "RIP";

/// Reads the time-stamp counter.
pub fn ticks() -> u64 {
    // SAFETY: every processor that runs guests has a time-stamp counter, and Linux lets programs read it.
    unsafe { std::arch::x86_64::_rdtsc() }
}
