//! What a guest's use of its counters costs the host: Tally's PMUs beside KVM's own, with the same `tally`, kernel, initrd
//! and program (`programs/pmu_workload.rs`) on the same simulated host.
//!
//! The program marks windows in which it does a thing a few times, or twice as often. What the host did in them is counted
//! from outside, in a boot each: exits and system calls, time, and instructions, because what looks also costs. Of many windows
//! some have no clock's interrupt, and the difference of two of those is exact. On a RISC-V host the program runs on the host itself,
//! too, and time is in hundreds of instructions, so that of a switch or a sample is exact to fifty.

mod mark;
mod riscv64;
mod script;
mod table;
mod windows;

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use guest_images::{Arch, Progress, Release};

pub use mark::{END, Mark, Work, tell_host};
pub use table::{costs, overflow_calls};
pub use windows::{PerUnit, Quantity};

use crate::{Error, Result, Scenario, default_host};
use windows::Windows;

/// How many windows of each kind there are.
pub const ROUNDS: u8 = 9;
/// How many instructions are between two overflows.
pub const SPACING: u32 = 20_000;

/// The programs under test.
pub struct Programs {
    /// `tally`.
    pub tally: PathBuf,
    /// `pmu-workload`, which runs in the guest.
    pub workload: PathBuf,
}

/// In place of a PMU's name: without a guest. Only on RISC-V.
pub const HOST: &str = "host";

/// What one PMU costs.
pub struct Figures {
    /// Its name in `tally run --pmu NAME`, or [`HOST`].
    pub pmu: &'static str,
    exits: Windows,
    time: Windows,
    instructions: Windows,
}

impl Figures {
    /// What one unit of this work costs with so many events; nothing if that cannot be measured: a guest that has all
    /// of the host's counters leaves none to count it with.
    pub fn cost(&self, work: Work, events: u8, quantity: &Quantity) -> Option<PerUnit> {
        let windows = match quantity {
            Quantity::Exits | Quantity::Runs | Quantity::OtherCalls | Quantity::Call(_) => &self.exits,
            Quantity::Nanoseconds => &self.time,
            Quantity::HostUserInstructions | Quantity::GuestInstructions => &self.instructions,
        };
        windows.cost(work, events, quantity)
    }

    /// All instructions that a unit costs, the host's and the guest's, without those that the program was executing anyway.
    pub fn instructions(&self, work: Work, events: u8) -> Option<PerUnit> {
        Some(self.cost(work, events, &Quantity::Nanoseconds)? - work.own())
    }

    /// The system calls that one unit costs, except `KVM_RUN`.
    pub fn calls(&self, work: Work, events: u8) -> Vec<(String, PerUnit)> {
        self.exits.calls(work, events)
    }
}

/// Measures PMUs by their names, on one simulated host.
pub fn measure(
    arch: Arch,
    pmus: &[&'static str],
    programs: &Programs,
    progress: &mut Progress,
) -> Result<Vec<Figures>> {
    let workload = fs::read(&programs.workload).map_err(Error::file("read", &programs.workload))?;
    let outcome = Scenario::new(script::script(arch, pmus))
        .named(match arch {
            Arch::X86_64 => "figures pmu",
            Arch::Riscv64 => "figures riscv",
        })
        .host(default_host(arch))
        .file(&programs.tally, "tally")
        .file(&programs.workload, "pmu-workload")
        .guest_with(Release::of(arch), &[("pmu-workload", &workload)], progress)?
        .limit(Duration::from_mins(20))
        .run(progress)?;
    if outcome.status != 0 {
        return Err(Error::Command(String::from_utf8_lossy(&outcome.stderr).trim().to_owned()));
    }
    let text = outcome.text();
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
    let incomplete = || Error::Command("the measuring script, which did not print everything".to_owned());
    pmus.iter().map(figures).collect::<Option<_>>().ok_or_else(incomplete)
}
