//! The benchmark: what it costs a program that its counters are used, on the host itself, in Tally's guests and in those of the
//! distribution's QEMU with KVM's own vPMU; one after the other on one host, with the same kernel, initrd, programs and script.
//!
//! The program takes its own time, from its first round to its last, so that perf's start is not in it. In the lab the
//! host is simulated, one of its nanoseconds is an instruction, and every run gives the same numbers. But what a real processor
//! takes for an exit or a system call is more than the instructions of that: [`Model`] adds it.

mod figures;
mod plan;
mod script;
mod table;

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use guest_images::{Progress, Suite};

pub use figures::{Cost, Counts, Figures, Model, Samples, Spread};
pub use plan::{ALL, Column, Events, Measure, Modes, QUICK, Row, Speed, Workload};
pub use script::{Limit, Plan};
pub use table::table;

use crate::{Error, Result, Scenario};

/// What a guest's program tells the host when its rounds begin.
pub const BEGIN: u32 = 0x7a12_0001;
/// What it tells at their end.
pub const END: u32 = 0x7a12_0000;
/// A program that reads its own counter does it whenever it has executed so many instructions.
pub const READ_EVERY: u64 = 20_000;

/// The programs that take part.
pub struct Programs {
    /// `tally`.
    pub tally: PathBuf,
    /// `bench-workload`.
    pub workload: PathBuf,
}

/// Measures on one simulated host.
pub fn in_the_lab(plan: &Plan, programs: &Programs, progress: &mut Progress) -> Result<Figures> {
    let workload = fs::read(&programs.workload).map_err(Error::file("read", &programs.workload))?;
    let scripts: Vec<_> = plan.limits.iter().map(|limit| plan.measuring(*limit)).collect();
    let mut in_guest: Vec<(&str, &[u8])> = vec![("bench-workload", &workload)];
    in_guest.extend(scripts.iter().map(|(name, script)| (name.as_str(), script.as_bytes())));
    let scenario = Scenario::new(plan.everywhere())
        .file(&programs.tally, "tally")
        .guest_with(Suite::default(), &in_guest, progress)?
        .limit(Duration::from_hours(3));
    let place = |scenario: Scenario, (name, program): &(&str, &[u8])| scenario.program(*program, name);
    let outcome = in_guest.iter().fold(scenario, place).run(progress)?;
    if outcome.status != 0 {
        return Err(Error::Command(String::from_utf8_lossy(&outcome.stderr).trim().to_owned()));
    }
    Figures::read(plan, &outcome.text())
}
