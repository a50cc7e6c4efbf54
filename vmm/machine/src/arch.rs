//! What differs between processors: a room for each, with the same doors.
//!
//! | door | behind it |
//! |---|---|
//! | `board` | what a machine is made of beside memory and virtio devices, and what its kernel is told of that |
//! | `clock` | the processor's clock |
//! | `exit` | what `KVM_RUN` comes back for |
//! | `host` | the processor that the host has |
//! | `kvm` | what KVM must be able to do, and what it is called |
//! | `loader` | which files are kernels, how they are loaded, and which of their instructions are changed |
//! | `machine` | where the devices are |
//! | `memory` | where the guest's memory is |
//! | `pmu` | which PMUs there are, and how they are driven and interrupt |

#[cfg(target_arch = "riscv64")]
mod riscv64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "riscv64")]
pub use self::riscv64::*;
#[cfg(target_arch = "x86_64")]
pub use self::x86_64::*;
