//! The benchmark: what it costs a program that its counters are used, on the host itself, in Tally's guests and in those of the
//! distribution's QEMU with KVM's own vPMU; one after the other on one host, with the same kernel, initrd, programs and script.
//!
//! The program takes its own time, from its first round to its last, so that perf's start is not in it. In the lab the
//! host is simulated, one of its nanoseconds is an instruction, and every run gives the same numbers. But what a real processor
//! takes for an exit or a system call is more than the instructions of that: [`Model`] adds it.

mod figures;
pub mod here;
mod plan;
mod script;
mod table;

use std::fs;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use guest_images::{Progress, Suite};

pub use figures::{Cost, Counts, Figures, Model, Samples, Spread};
pub use plan::{ALL, Column, Events, Length, Measure, Modes, QUICK, Row, Workload};
pub use script::{Limit, Plan};
pub use table::table;

use crate::{Error, HostPmu, Result, Scenario};

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
    let parts = Parts::new(plan, programs)?;
    let scenario = Scenario::new(plan.everywhere())
        .named("bench")
        .file(&programs.tally, "tally")
        .guest_with(Suite::default(), &parts.borrowed(), progress)?
        .limit(Duration::from_hours(3));
    let scenario = if plan.columns.contains(&Column::Mediated) {
        scenario.host(Suite::Sid).pmu(HostPmu::PerfMonV2)
    } else {
        scenario
    };
    let place = |scenario: Scenario, &(name, program): &(&str, &[u8])| scenario.program(program, name);
    let scenario = parts.borrowed().iter().fold(scenario, place);
    let mut printed = Vec::new();
    // It says there how far it is, and what is wrong.
    match scenario.run_with(progress, &mut printed, &mut io::stderr())? {
        0 => Figures::read(plan, &String::from_utf8_lossy(&printed)),
        _ => Err(said_why()),
    }
}

fn said_why() -> Error {
    Error::Command("the measuring script".to_owned())
}

/// What the host and the guests have alike, each with its name: the workloads, and the scripts that measure.
struct Parts(Vec<(String, Vec<u8>)>);

impl Parts {
    fn new(plan: &Plan, programs: &Programs) -> Result<Self> {
        let workload = fs::read(&programs.workload).map_err(Error::file("read", &programs.workload))?;
        let scripts = plan.limits.iter().map(|limit| plan.measuring(*limit));
        let scripts = scripts.map(|(name, script)| (name, script.into_bytes()));
        Ok(Self([("bench-workload".to_owned(), workload)].into_iter().chain(scripts).collect()))
    }

    fn borrowed(&self) -> Vec<(&str, &[u8])> {
        self.0.iter().map(|(name, content)| (&**name, &**content)).collect()
    }
}
