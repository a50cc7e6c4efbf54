//! The architectures, and which of them this program is compiled for. What each supplies is in [`crate::architecture`].

#[cfg(target_arch = "riscv64")]
mod riscv64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

/// The architecture of this host, and so of its guests.
#[cfg(target_arch = "riscv64")]
pub type Arch = riscv64::Riscv64;
/// The architecture of this host, and so of its guests.
#[cfg(target_arch = "x86_64")]
pub type Arch = x86_64::X86_64;
