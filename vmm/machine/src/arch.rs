//! Chooses the architecture that this program is compiled for. Each architecture implements the traits of
//! [`crate::architecture`].

#[cfg(target_arch = "riscv64")]
mod riscv64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

use crate::architecture::{self, Architecture};

/// Architecture of this host, which is also the guests' architecture.
#[cfg(target_arch = "riscv64")]
pub type Arch = riscv64::Riscv64;
/// Architecture of this host, which is also the guests' architecture.
#[cfg(target_arch = "x86_64")]
pub type Arch = x86_64::X86_64;

/// See [`Architecture::Model`].
pub type Model = <Arch as Architecture>::Model;
/// See [`Architecture::Format`].
pub type Format = <Arch as Architecture>::Format;
/// See [`Architecture::Board`].
pub type Board = <Arch as Architecture>::Board;
/// See [`Architecture::Run`].
pub type Run = <Arch as Architecture>::Run;
/// A vCPU's emulated PMU.
pub type Emulated = <Run as architecture::Run>::Emulated;
