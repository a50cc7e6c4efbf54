//! The cost of a guest's use of its counters, with Tally's PMUs and with KVM's own. `tally`, kernel, initrd, program
//! (`programs/pmu_workload.rs`) and simulated host are the same.
//!
//! The program marks windows in which it does the same work a few times, or more often. The host counts in these
//! windows exits and system calls, time, and instructions. Each of these three is counted in a boot of its own, because
//! counting has a cost too. Of the many windows of a kind, some have no timer interrupt, and the difference between two
//! of those is exact. On a RISC-V host the program runs on the host itself as well. Time there has a resolution of a
//! hundred instructions, so the cost of a sample is exact to fifty. That of a task switch differs by more, between
//! windows and between runs.

mod mark;
mod per_unit;
mod riscv64;
mod script;
mod table;
mod windows;

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use guest_images::{Progress, Release};

pub use crate::scenario::programs::ON_INTEL;
#[cfg(target_arch = "x86_64")]
pub use mark::host_is_intel;
pub use mark::{END, Mark, Work, tell_host};
pub use per_unit::PerUnit;
pub use table::costs;
pub use windows::Quantity;

use crate::error::{Error, Result};
use crate::scenario::Scenario;
use crate::simulator::board::{HostPmu, Processor};
use crate::simulator::image::default_host;
use windows::Windows;

/// Number of windows of each kind.
pub const ROUNDS: u8 = 9;
/// Number of instructions between two overflows.
pub const SPACING: u32 = 20_000;

/// The programs under test.
pub struct Programs {
    pub tally: PathBuf,
    /// `pmu-workload`, which runs in the guest.
    pub workload: PathBuf,
}

/// The host itself, in place of a PMU's name. Only on RISC-V.
pub const HOST: &str = "host";

/// AMD's PMU without Tally's sandbox.
pub const UNCONFINED: &str = "amd,unconfined";

/// Costs with one PMU.
pub struct Figures {
    /// Name of the PMU in `tally run --pmu NAME`, [`UNCONFINED`] or [`HOST`].
    pub pmu: &'static str,
    exits: Windows,
    time: Windows,
    instructions: Windows,
}

impl Figures {
    /// Returns the cost of one unit of this work with this many events, or `None` if the cost cannot be measured. This
    /// is so for instructions if the guest uses all of the host's counters.
    pub fn cost(&self, work: Work, events: u8, quantity: &Quantity) -> Option<PerUnit> {
        let windows = match quantity {
            Quantity::Exits | Quantity::Runs | Quantity::OtherCalls | Quantity::Call(_) => &self.exits,
            Quantity::Nanoseconds => &self.time,
            Quantity::HostUserInstructions | Quantity::GuestInstructions => &self.instructions,
        };
        windows.cost(work, events, quantity)
    }

    /// Returns the number of instructions per unit, the host's and the guest's, without those of the program itself.
    pub fn instructions(&self, work: Work, events: u8) -> Option<PerUnit> {
        Some(self.cost(work, events, &Quantity::Nanoseconds)? - work.own_instructions())
    }

    /// Returns the numbers of system calls per unit, except `KVM_RUN`.
    pub fn calls(&self, work: Work, events: u8) -> Vec<(String, PerUnit)> {
        self.exits.calls(work, events)
    }
}

/// Measures the PMUs with these names on one simulated host.
pub fn measure(
    processor: Processor,
    pmus: &[&'static str],
    programs: &Programs,
    progress: &mut Progress,
) -> Result<Vec<Figures>> {
    let workload = fs::read(&programs.workload).map_err(Error::file("read", &programs.workload))?;
    let arch = processor.arch();
    let (name, pmu, minutes) = match processor {
        Processor::Amd => ("figures pmu", HostPmu::default(), 20),
        Processor::Intel => ("figures intel", HostPmu::INTEL, 60),
        Processor::Riscv64 => ("figures riscv", HostPmu::default(), 20),
    };
    let scenario = Scenario::with_all_counters(script::script(processor, pmus))
        .named(name)
        .host(default_host(arch))
        .pmu(pmu)
        .file(&programs.tally, "tally")
        .file(&programs.workload, "pmu-workload")
        .guest_with(Release::of(arch), &[("pmu-workload", &workload)], progress)?
        .limit(Duration::from_mins(minutes));
    let text = super::output::run(&scenario, progress)?;
    let section = |pmu: &str, kind: &str| {
        let (_, rest) = text.split_once(&format!("begin {pmu}.{kind}\n"))?;
        Some(rest.split_once("\nend\n")?.0)
    };
    let samples = |pmu, kind| section(pmu, kind).map(Windows::from_samples).unwrap_or_default();
    let figures = |&pmu| {
        let figures = Figures {
            pmu,
            exits: section(pmu, "exits").map(Windows::from_trace).unwrap_or_default(),
            time: samples(pmu, "time"),
            instructions: samples(pmu, "instructions"),
        };
        let complete = figures.cost(Work::Overflow, 6, &Quantity::Nanoseconds).is_some()
            && (pmu == HOST || figures.cost(Work::Overflow, 6, &Quantity::Exits).is_some());
        complete.then_some(figures)
    };
    let incomplete = || Error::Command("the measuring script, whose output is incomplete".to_owned());
    pmus.iter().map(figures).collect::<Option<_>>().ok_or_else(incomplete)
}
