//! The lab: a simulated host with an exact PMU, for machines that have none.
//!
//! A patched QEMU simulates a processor with virtualisation and a PMU that counts every instruction (`cpu`), an
//! unmodified Debian kernel with KVM runs on it (`host`), and a [`Scenario`] is a script that runs there. Virtual time
//! is counted in instructions, so that a scenario does the same thing every time and a test can say `==`.

mod cpu;
mod error;
mod host;
mod machine;
pub mod peer;
pub mod programs;
mod scenario;
pub mod self_test;
mod tools;

pub use cpu::{LabCpu, build as build_cpu};
pub use error::Error;
pub use host::{HostImage, build as build_host};
pub use machine::HostPmu;
pub use scenario::{Outcome, Scenario};

/// What every fallible function here returns.
pub type Result<T> = std::result::Result<T, Error>;
