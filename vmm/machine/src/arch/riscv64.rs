//! 64-bit RISC-V processors with the hypervisor extension.

#![expect(
    clippy::unused_self,
    reason = "these doors are methods because x86-64's need what they are methods of"
)]

mod aia;
pub mod board;
pub mod clock;
pub mod exit;
mod fdt;
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
