//! Hosts with 64-bit RISC-V processors.

pub mod calls;
pub mod help;
pub mod host;
