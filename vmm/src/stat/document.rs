//! What `tally stat` has to tell, as machines read it: a VM at one moment, and what it did since another. Names and meanings
//! of what is here are a contract; times are in seconds.

use std::collections::BTreeMap;

use serde::Serialize;
use vpmu::report::{CounterReport, Report, State, Statistics};
use vpmu_perf::{Attributed, Reading, Work};

use crate::control::message::{Hardware, Snapshot, Summary, Vcpu};
use tally_machine::{Exits, Share};

/// A VM in a few words.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AboutDocument {
    /// Its process.
    pub pid: u32,
    /// What its user calls it.
    pub name: String,
    /// What it runs.
    pub runs: String,
    /// The PMU that its guest sees.
    pub pmu: String,
    /// How many vCPUs it has.
    pub cpus: u8,
    /// How much memory, in bytes.
    pub memory: u64,
    /// When it was started, since 1970.
    pub started: u64,
    /// How long ago that was.
    pub age: f64,
}

/// A VM.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct VmDocument {
    /// What it is.
    #[serde(flatten)]
    pub about: AboutDocument,
    /// The vCPUs because of whose counters it stands still, if it does.
    pub paused_by: Vec<u8>,
    /// How much time there was between the two looks.
    pub interval: f64,
    /// Its vCPUs.
    pub vcpus: Vec<VcpuDocument>,
}

/// A vCPU.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct VcpuDocument {
    /// Its number.
    pub vcpu: u8,
    /// Its thread's.
    pub thread: i32,
    /// Its counters; none if its PMU is not Tally's.
    pub counters: Vec<CounterDocument>,
    /// What was done for them since the VM was started.
    pub statistics: Option<Statistics>,
    /// What it came out of the guest to Tally for, since the VM was started.
    pub exits: Exits,
    /// What KVM has counted for it since then, by KVM's names.
    pub kvm: Option<BTreeMap<String, u64>>,
    /// What it did between the two looks.
    pub interval: IntervalDocument,
    /// The counters of the CPU that it runs on.
    pub hardware: Option<HardwareDocument>,
}

/// A counter.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CounterDocument {
    /// Its number.
    pub counter: usize,
    /// What it counts, as `perf` names that.
    pub event: Option<String>,
    /// What the guest sees.
    pub value: u64,
    /// `unused`, `stopped`, `counting`, `starved`, `refused`, ...
    pub state: String,
    /// Why the host refuses its event.
    pub refusal: Option<String>,
    /// Which of the host's counters counts for it, while one does.
    pub hardware: Option<u32>,
    /// How often it has overflowed.
    pub overflows: u64,
    /// For how long what counts for it was to count.
    pub enabled: Option<f64>,
    /// For how long that did.
    pub running: Option<f64>,
    /// How often it was without hardware.
    pub starvations: u64,
    /// For how long.
    pub starved: f64,
    /// How much of its value is an estimate.
    pub estimated: u64,
}

/// What a vCPU did between two looks.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct IntervalDocument {
    /// Its exits to Tally.
    pub exits: Exits,
    /// What KVM has counted.
    pub kvm: Option<BTreeMap<String, u64>>,
    /// The part of the time that Tally spent on its PMU.
    pub pmu_share: Option<f64>,
    /// What its thread did in the guest.
    pub guest: WorkDocument,
    /// And for it on the host.
    pub host: WorkDocument,
}

/// What was done on one side.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct WorkDocument {
    /// Instructions; none if they were not counted all the time.
    pub instructions: Option<u64>,
    /// For which part of the time they were counted.
    pub instructions_counted: f64,
    /// Cycles, as the instructions.
    pub cycles: Option<u64>,
    /// For which part of the time they were counted.
    pub cycles_counted: f64,
}

/// Whose a CPU's counters are.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct HardwareDocument {
    /// Which CPU.
    pub cpu: usize,
    /// How many counters it has.
    pub counters: usize,
    /// Those that count for this vCPU.
    pub held: Vec<u32>,
    /// How many nobody holds.
    pub free: usize,
    /// How many others keep to themselves.
    pub others: usize,
    /// Who that may be, as far as this user can see.
    pub holders: Vec<String>,
}

impl From<Summary> for AboutDocument {
    fn from(summary: Summary) -> Self {
        let Summary { pid, name, runs, pmu, cpus, memory, started, age_ms } = summary;
        Self { pid, name, runs, pmu, cpus, memory, started, age: ratio(age_ms, 1_000) }
    }
}

impl VmDocument {
    /// Of a VM as it is, and as it was.
    pub fn new(now: Snapshot, before: &Snapshot) -> Self {
        let vcpus = now.vcpus.into_iter().map(|vcpu| {
            let before = before.vcpus.iter().find(|before| before.report.vcpu == vcpu.report.vcpu);
            VcpuDocument::new(vcpu, before)
        });
        Self {
            about: now.vm.into(),
            paused_by: now.paused_by,
            interval: seconds(now.at_ns.saturating_sub(before.at_ns)),
            vcpus: vcpus.collect(),
        }
    }
}

impl VcpuDocument {
    fn new(now: Vcpu, before: Option<&Vcpu>) -> Self {
        let counters = now.report.pmu.iter().flat_map(|pmu| &pmu.counters);
        let held = now.report.pmu.iter().flat_map(Report::held).collect();
        Self {
            vcpu: now.report.vcpu,
            thread: now.report.thread,
            counters: (0..)
                .zip(counters)
                .map(|(number, report)| CounterDocument::new(number, report))
                .collect(),
            statistics: now.report.pmu.as_ref().map(|pmu| pmu.statistics),
            exits: now.report.exits,
            interval: IntervalDocument::new(&now, before.unwrap_or(&now)),
            hardware: now.hardware.map(|hardware| HardwareDocument::new(hardware, held)),
            kvm: now.kvm,
        }
    }
}

impl CounterDocument {
    fn new(counter: usize, report: &CounterReport) -> Self {
        let (state, refusal) = match &report.state {
            State::Unused => ("unused", None),
            State::Stopped => ("stopped", None),
            State::Counting => ("counting", None),
            State::Starved => ("starved", None),
            State::Disabled => ("disabled", None),
            State::Refused(why) => ("refused", Some(why.clone())),
        };
        Self {
            counter,
            event: report.event.clone(),
            value: report.value,
            state: state.to_owned(),
            refusal,
            hardware: report.backing.and_then(|backing| backing.hardware),
            overflows: report.overflows,
            enabled: report.backing.map(|backing| seconds(backing.enabled_ns)),
            running: report.backing.map(|backing| seconds(backing.running_ns)),
            starvations: report.starvations,
            starved: seconds(report.starved_ns),
            estimated: report.estimated,
        }
    }
}

impl IntervalDocument {
    fn new(now: &Vcpu, before: &Vcpu) -> Self {
        let kvm = now.kvm.as_ref().zip(before.kvm.as_ref()).map(|(now, before)| {
            let since = |(name, value): (&String, &u64)| {
                (name.clone(), value - before.get(name).unwrap_or(value).min(value))
            };
            now.iter().map(since).collect()
        });
        let work = |work: &Option<Attributed>| work.unwrap_or_default();
        let (worked, work_before) = (work(&now.work), work(&before.work));
        Self {
            exits: now.report.exits.since(before.report.exits),
            kvm,
            pmu_share: share(now.report.share, before.report.share),
            guest: WorkDocument::new(worked.guest, work_before.guest),
            host: WorkDocument::new(worked.host, work_before.host),
        }
    }
}

impl WorkDocument {
    fn new(now: Work, before: Work) -> Self {
        let since = |now: Option<Reading>, before: Option<Reading>| Some(now?.since(before?));
        let instructions = since(now.instructions, before.instructions);
        let cycles = since(now.cycles, before.cycles);
        Self {
            instructions: instructions.and_then(Reading::exact),
            instructions_counted: instructions.map_or(0.0, counted),
            cycles: cycles.and_then(Reading::exact),
            cycles_counted: cycles.map_or(0.0, counted),
        }
    }
}

impl HardwareDocument {
    fn new(hardware: Hardware, held: Vec<u32>) -> Self {
        let Hardware { cpu, counters, available, holders } = hardware;
        let free = available.saturating_sub(held.len());
        Self { cpu, counters, free, others: counters.saturating_sub(free + held.len()), held, holders }
    }
}

#[expect(clippy::cast_precision_loss, reason = "a part to six digits is enough")]
fn ratio(part: u64, whole: u64) -> f64 {
    part as f64 / whole as f64
}

fn share(now: Share, before: Share) -> Option<f64> {
    let (all, pmu) = (now.all.saturating_sub(before.all), now.pmu.saturating_sub(before.pmu));
    (all > 0).then(|| ratio(pmu, all))
}

fn counted(reading: Reading) -> f64 {
    if reading.enabled > 0 { ratio(reading.running, reading.enabled) } else { 1.0 }
}

fn seconds(nanoseconds: u64) -> f64 {
    ratio(nanoseconds, 1_000_000_000)
}
