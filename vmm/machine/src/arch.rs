//! What depends on the processor's architecture: a module for each architecture, with the same items. A program has
//! those of the architecture that it is compiled for, which is its host's and its guests'.
//!
//! | item | what it is |
//! |---|---|
//! | `REQUIREMENTS`, `Processor` | what machines need from KVM; the host's processor |
//! | `Model`, `Choice`, `Offer`, `Unavailable` | PMUs that Tally can emulate; a value of `--pmu`, and what the host offers for it |
//! | `Pmu`, `VcpuPmu`, `Emulated` | the PMU that a guest sees; that of a vCPU on its thread |
//! | `Format`, `Kernel`, `Entry`, `SavedFormat` | kernels; the first vCPU at a kernel's entry; what is kept of a patched kernel |
//! | `Board`, `Plan` | everything around the processors; the part of a machine's configuration that it needs |
//! | `KvmRun`, `ArchExit` | a vCPU's file descriptor on its thread; exits that only this architecture has |
//! | `KvmState`, `KvmVcpuState`, `Fingerprint` | what KVM holds, and what a guest sees of the processor, in a snapshot |
//! | `Look`, `AddressSpace` | where a vCPU is and who called it; page tables by which the guest's kernel is read |
//! | `Unwinder` | how the callers in a guest's kernel are found |
//! | `INSTRUCTION_POINTER`, `ticks` | the register's name; the processor's clock |

#[cfg(target_arch = "riscv64")]
#[expect(
    clippy::needless_pass_by_value,
    clippy::unnecessary_wraps,
    clippy::unused_self,
    reason = "the signatures are those of all architectures"
)]
mod riscv64;
#[cfg(target_arch = "x86_64")]
#[expect(
    clippy::unnecessary_wraps,
    clippy::unused_self,
    reason = "the signatures are those of all architectures"
)]
mod x86_64;

#[cfg(target_arch = "riscv64")]
pub use self::riscv64::*;
#[cfg(target_arch = "x86_64")]
pub use self::x86_64::*;
