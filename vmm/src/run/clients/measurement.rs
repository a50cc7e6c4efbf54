//! Measurements of a VM. A client is told the difference between its latest request and the one before.

use std::collections::BTreeMap;
use std::time::Duration;

use tally_machine::{Share, VcpuReport};
use vpmu_perf::{Attributed, Reading};

use super::hardware::CpuCounters;
use crate::protocol::status::{Interval, Summary, VcpuStatus, VmStatus, Work};

/// The measurement of a VM for one request of a client.
#[derive(Debug, Clone)]
pub struct VmMeasurement {
    pub about: Summary,
    /// Time since the VM was started.
    pub at: Duration,
    /// Numbers of the vCPUs for whose starved counters the machine is paused.
    pub paused_by: Vec<u8>,
    /// The vCPUs that have answered.
    pub vcpus: Vec<VcpuMeasurement>,
}

/// The measurement of a vCPU for one request of a client.
#[derive(Debug, Clone)]
pub struct VcpuMeasurement {
    /// Report of the vCPU's own thread.
    pub report: VcpuReport,
    /// KVM's statistics, if KVM has any.
    pub kvm: Option<BTreeMap<String, u64>>,
    /// Instructions and cycles of the thread in the guest and in the host, if this user may count them.
    pub work: Option<Attributed>,
    /// Instructions of the guest's in `work` that each entry into it has added.
    pub entry_adds: u64,
    /// Counters of the host CPU on which the thread ran last.
    pub hardware: Option<CpuCounters>,
}

impl VmMeasurement {
    /// Returns the status since the measurement `before`. If a vCPU is not in `before`, its differences are 0.
    pub fn since(&self, before: &Self) -> VmStatus {
        let vcpu = |now: &VcpuMeasurement| {
            let before = before.vcpus.iter().find(|before| before.report.vcpu == now.report.vcpu);
            now.since(before.unwrap_or(now))
        };
        VmStatus {
            about: self.about.clone(),
            paused_by: self.paused_by.clone(),
            interval: seconds(self.at.saturating_sub(before.at)),
            vcpus: self.vcpus.iter().map(vcpu).collect(),
        }
    }
}

impl VcpuMeasurement {
    fn since(&self, before: &Self) -> VcpuStatus {
        let kvm: Option<BTreeMap<_, _>> = self.kvm.as_ref().zip(before.kvm.as_ref()).map(|(now, before)| {
            let since = |(name, value): (&String, &u64)| {
                (name.clone(), value - before.get(name).unwrap_or(value).min(value))
            };
            now.iter().map(since).collect()
        });
        let entries = kvm.as_ref().and_then(|kvm| kvm.get("exits")).copied().unwrap_or(0);
        let (work, work_before) = (self.work.unwrap_or_default(), before.work.unwrap_or_default());
        let report = self.report.clone();
        VcpuStatus {
            interval: Interval {
                exits: report.exits.since(before.report.exits),
                kvm,
                pmu_share: share(report.share, before.report.share),
                guest: without(
                    entries.saturating_mul(self.entry_adds),
                    work_since(work.guest, work_before.guest),
                ),
                host: work_since(work.host, work_before.host),
            },
            kvm: self.kvm.clone(),
            hardware: self.hardware.as_ref().map(|cpu| cpu.held_by(&report)),
            report,
        }
    }
}

fn work_since(now: vpmu_perf::Work, before: vpmu_perf::Work) -> Work {
    let since = |now: Option<Reading>, before: Option<Reading>| Some(now?.since(before?));
    let instructions = since(now.instructions, before.instructions);
    let cycles = since(now.cycles, before.cycles);
    Work {
        instructions: instructions.and_then(Reading::exact),
        instructions_counted: instructions.map_or(0.0, counted),
        cycles: cycles.and_then(Reading::exact),
        cycles_counted: cycles.map_or(0.0, counted),
    }
}

/// Leaves out what the processor has counted too much.
fn without(added: u64, work: Work) -> Work {
    Work { instructions: work.instructions.map(|counted| counted.saturating_sub(added)), ..work }
}

/// Returns the part of the time in which an event was on a hardware counter.
fn counted(reading: Reading) -> f64 {
    if reading.enabled > 0 { ratio(reading.running, reading.enabled) } else { 1.0 }
}

fn share(now: Share, before: Share) -> Option<f64> {
    let (all, pmu) = (now.all.saturating_sub(before.all), now.pmu.saturating_sub(before.pmu));
    (all > 0).then(|| ratio(pmu, all))
}

/// Returns `part` divided by `whole`.
#[expect(clippy::cast_precision_loss, reason = "a part to six digits is enough")]
pub fn ratio(part: u64, whole: u64) -> f64 {
    part as f64 / whole as f64
}

fn seconds(time: Duration) -> f64 {
    ratio(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), 1_000_000_000)
}
