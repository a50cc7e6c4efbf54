//! What `tally-lab figures` measures, a module for each table: scripts whose work has exact costs on a simulated host.

// `pmu-workload` is compiled for RISC-V together with this library. What some of these modules run exists on x86-64
// only.
#[cfg(target_arch = "x86_64")]
pub mod boot;
pub mod commands;
pub mod ebb;
pub mod fleet;
pub mod net;
mod output;
pub mod pmu;
#[cfg(target_arch = "x86_64")]
pub mod riscv;
#[cfg(target_arch = "x86_64")]
pub mod shares;
#[cfg(target_arch = "x86_64")]
pub mod upstream;
#[cfg(target_arch = "x86_64")]
pub mod watch;

pub use output::run;
