//! AMD's and Intel's processors.

mod acpi;
pub mod board;
pub mod clock;
mod coalescing;
mod cpuid;
pub mod exit;
mod firmware;
pub mod host;
pub mod kvm;
pub mod loader;
pub mod machine;
pub mod memory;
mod msr;
pub mod pmu;
mod registers;

/// What it is called.
pub const NAME: &str = "x86-64";
