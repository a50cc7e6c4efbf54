//! What `tally-lab figures` measures, a module for each table: scripts whose work has exact costs on a simulated host.

// `pmu-workload` is compiled for RISC-V together with this library. What some of these modules run exists on x86-64
// only.
#[cfg(target_arch = "x86_64")]
pub mod boot;
pub mod commands;
pub mod ebb;
pub mod fleet;
pub mod net;
pub mod pmu;
#[cfg(target_arch = "x86_64")]
pub mod riscv;
#[cfg(target_arch = "x86_64")]
pub mod watch;

use guest_images::Progress;

use crate::error::{Error, Result};
use crate::scenario::Scenario;

/// Runs a measuring script. Returns what it printed.
pub fn run(scenario: &Scenario, progress: &mut Progress) -> Result<String> {
    let outcome = scenario.run(progress)?;
    if outcome.status == 0 {
        Ok(outcome.text())
    } else {
        Err(Error::Command(String::from_utf8_lossy(&outcome.stderr).trim().to_owned()))
    }
}

/// The error of a script that printed something else than it should.
fn unreadable(text: &str) -> Error {
    Error::Command(format!("the measuring script printed\n{text}"))
}
