//! 64-bit RISC-V processors with the hypervisor extension.

mod aia;
pub mod board;
pub mod check;
pub mod clock;
pub mod exit;
mod fdt;
pub mod help;
pub mod host;
mod isa;
pub mod kvm;
pub mod loader;
pub mod machine;
pub mod memory;
pub mod pmu;
mod register;
mod sbi;

/// What it is called.
pub const NAME: &str = "RISC-V";
