//! Status of a running VM: the schema of `tally list` and `tally stat` with `--json`, and of the answers on the
//! VM's control socket. The text of `tally stat` and the metrics are rendered from the same types.
//!
//! What a vCPU's own thread reports is [`VcpuReport`]. docs/operations.md lists the fields. Fields may be added; those
//! here keep their names, order and meaning. Times are in seconds. Outside of [`Interval`], counts are those since the
//! VM was started. What cannot be known is `None`, and `null` in JSON.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tally_machine::{Exits, VcpuReport};

/// What a VM is, which `tally list` shows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    pub pid: u32,
    /// Name that the user gave with `--name`, or else the name of what the VM runs.
    pub name: String,
    /// What the VM runs: a command in the default guest, or else a kernel.
    pub runs: String,
    /// PMU that the guest sees.
    pub pmu: String,
    /// The host counts entries into the guest, which are left out of what the guest counts.
    #[serde(default)]
    pub leaves_out_entries: bool,
    /// Number of vCPUs.
    pub cpus: u8,
    /// Size of the guest's memory, in bytes.
    pub memory: u64,
    /// Time of the start, since 1970.
    pub started: u64,
    /// Time since the start.
    pub age: f64,
}

/// A VM at one request of a client.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VmStatus {
    /// What the VM is.
    #[serde(flatten)]
    pub about: Summary,
    /// vCPUs for whose starved counters the machine stands still; empty while it runs.
    pub paused_by: Vec<u8>,
    /// Time since the client's last request.
    pub interval: f64,
    /// The VM's vCPUs. A vCPU that has ended is not among them.
    pub vcpus: Vec<VcpuStatus>,
}

/// The counters and exits of a VM, for the metrics. Unlike [`VmStatus`], it makes the VM count nothing for it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Whether the machine stands still until its counters have hardware.
    pub stands_still: bool,
    /// The VM's vCPUs. A vCPU that has ended is not among them.
    pub vcpus: Vec<VcpuReport>,
}

/// A vCPU at one request of a client.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VcpuStatus {
    /// What the vCPU's own thread reports.
    #[serde(flatten)]
    pub report: VcpuReport,
    /// What KVM counts for the vCPU, by KVM's names.
    pub kvm: Option<BTreeMap<String, u64>>,
    /// What the vCPU did since the client's last request.
    pub interval: Interval,
    /// Counters of the host CPU on which the vCPU ran when that was last probed.
    pub hardware: Option<Hardware>,
}

/// What a vCPU did since the client's last request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// Exits to Tally, by reason.
    pub exits: Exits,
    /// What KVM has counted, by KVM's names.
    pub kvm: Option<BTreeMap<String, u64>>,
    /// Part of the time from an exit for the PMU to the next entry, without what KVM itself does.
    pub pmu_share: Option<f64>,
    /// What the vCPU's thread did in the guest.
    pub guest: Work,
    /// What the vCPU's thread did in the host.
    pub host: Work,
}

/// What a thread did in the guest, or in the host. The events that count this are multiplexed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Work {
    /// Instructions; none if they were not counted all the time.
    pub instructions: Option<u64>,
    /// Part of the time in which instructions were counted.
    pub instructions_counted: f64,
    /// Cycles; none if they were not counted all the time.
    pub cycles: Option<u64>,
    /// Part of the time in which cycles were counted.
    pub cycles_counted: f64,
}

/// Who holds a host CPU's counters. General-purpose counters only.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Hardware {
    pub cpu: usize,
    /// Number of counters that the CPU has.
    pub counters: usize,
    /// The counters that count for this vCPU.
    pub held: Vec<u32>,
    /// Number of counters that nobody holds.
    pub free: usize,
    /// Number of counters that others hold.
    pub others: usize,
    /// Who the others may be, as far as the user who looks can see. The VM leaves this empty: its process does not look
    /// at other processes.
    pub holders: Vec<String>,
}
