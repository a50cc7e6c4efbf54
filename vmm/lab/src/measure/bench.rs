//! The benchmark: how much the use of counters slows a program down, on the host itself, in Tally's guests, and in
//! guests of the distribution's QEMU with KVM's own vPMU. All of these are measured one after the other on one host,
//! with the same kernel, initrd, programs and script.
//!
//! The program measures its own time from its first round to its last, so the start of perf is not included. In the
//! lab, the host is simulated, an instruction takes one nanosecond, and every run has the same result. On a real
//! processor, an exit or a system call takes longer than its instructions; [`Model`] adds the difference.

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
pub use plan::{ALL, Column, Events, Length, Measure, Modes, QUICK, Row, Way, Workload};
pub use script::{Limit, Plan};
pub use table::{summary, table};

use crate::error::{Error, Result};
use crate::scenario::Scenario;
use crate::simulator::board::{HostPmu, Processor};

/// Number of the hypercall with which a guest's program marks the start of its rounds.
pub const BEGIN: u32 = 0x7a12_0001;
/// Number of the hypercall that marks their end.
pub const END: u32 = 0x7a12_0000;
/// Number of instructions between two reads of a program that reads its own counter.
pub const READ_EVERY: u64 = 20_000;

/// Paths of the programs that the benchmark runs.
pub struct Programs {
    pub tally: PathBuf,
    /// `bench-workload`.
    pub workload: PathBuf,
}

/// Runs the benchmark on one simulated host.
pub fn in_the_lab(plan: &Plan, programs: &Programs, progress: &mut Progress) -> Result<Figures> {
    let files = CommonFiles::new(plan, programs)?;
    let scenario = Scenario::with_all_counters(plan.main_script())
        .named("bench")
        .file(&programs.tally, "tally")
        .guest_with(Suite::default(), &files.borrowed(), progress)?
        .limit(Duration::from_hours(3));
    let scenario = if plan.columns.contains(&Column::Mediated) {
        scenario.host(Suite::Sid).pmu(HostPmu::PerfMonV2)
    } else if plan.host == Processor::Intel {
        scenario.pmu(HostPmu::INTEL)
    } else if plan.rows.iter().any(|row| row.measure == Measure::Read(Way::Rdpmc)) {
        scenario.host(Suite::Trixie)
    } else {
        scenario
    };
    let place = |scenario: Scenario, &(name, program): &(&str, &[u8])| scenario.program(program, name);
    let scenario = files.borrowed().iter().fold(scenario, place);
    let mut printed = Vec::new();
    // The script's progress and its errors are on standard error.
    match scenario.run_with(progress, &mut printed, &mut io::stderr())? {
        0 => Figures::read(plan, &String::from_utf8_lossy(&printed)),
        _ => Err(script_failed()),
    }
}

/// Returns the error of a script that has already printed the reason.
fn script_failed() -> Error {
    Error::Command("the measuring script".to_owned())
}

/// The files that the host and the guests have in common, each with its name: the workloads, and the measuring scripts.
struct CommonFiles(Vec<(String, Vec<u8>)>);

impl CommonFiles {
    fn new(plan: &Plan, programs: &Programs) -> Result<Self> {
        let workload = fs::read(&programs.workload).map_err(Error::file("read", &programs.workload))?;
        let scripts = plan.used_limits().map(|limit| plan.measuring_script(limit));
        let scripts = scripts.map(|(name, script)| (name, script.into_bytes()));
        Ok(Self([("bench-workload".to_owned(), workload)].into_iter().chain(scripts).collect()))
    }

    fn borrowed(&self) -> Vec<(&str, &[u8])> {
        self.0.iter().map(|(name, content)| (&**name, &**content)).collect()
    }
}
