//! The state of a virtual PMU, for snapshots and migration: everything that its guest can see.
//!
//! What the host does for the guest is not part of it: the host's events, their alarms, statistics and starvation. A
//! PMU that is restored opens events of its own, and a policy's minimum distance between two overflows begins anew. So
//! a guest can continue on another host, even on one of another vendor: its registers hold the guest's encodings, which
//! are mapped anew there.
//!
//! A state may come from a file, so nothing in it is trusted. A restored PMU can do no more than one whose guest has
//! written the same values to its registers.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The state of one vCPU's PMU. See [`crate::VirtualPmu::save`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PmuState {
    pub(crate) registers: Registers,
    pub(crate) unit: UnitState,
}

/// The registers of a model, without those that the models share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub(crate) enum Registers {
    /// AMD's.
    Amd {
        /// Name of the version.
        version: String,
        /// `PERF_CTL` of each counter.
        selects: Vec<u64>,
    },
    /// Intel's.
    Intel {
        /// Name of the version.
        version: String,
        /// `IA32_PERFEVTSEL` of each general counter.
        selects: Vec<u64>,
        /// `IA32_FIXED_CTR_CTRL`.
        fixed_control: u64,
        /// `IA32_DEBUGCTL`.
        debug_control: u64,
        /// Counters have lost their hardware or got it back, and the guest has not cleared the bit that says so.
        hardware_changed: bool,
    },
    /// RISC-V's.
    Riscv {
        /// Overflows interrupt.
        overflows: bool,
        /// The configuration of each counter.
        uses: Vec<Option<SbiUse>>,
    },
}

/// A counter's configuration in the SBI's terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SbiUse {
    /// `event_idx`.
    pub index: u64,
    /// `event_data`.
    pub data: u64,
    /// Counts in user mode.
    pub user: bool,
    /// Counts in the kernel.
    pub kernel: bool,
}

/// What all models share. Sets of counters are masks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct UnitState {
    /// The counters' values.
    pub values: Vec<u64>,
    /// Counters whose last overflow came too soon after the one before it, and is not reported yet.
    pub delayed: u64,
    /// Global control.
    pub control: u64,
    /// Global status.
    pub status: u64,
    /// All counters are frozen.
    pub frozen: bool,
    /// Counters that the operator has disabled.
    pub disabled: u64,
    /// The overflow interrupt.
    pub interrupt: InterruptState,
    /// How far the rate limiter has spent ahead.
    pub spent_ahead: Duration,
    /// Counters for which the thread that runs wants event-based branches.
    #[serde(default)]
    pub branches: Vec<BranchState>,
}

/// A counter for which a thread wants event-based branches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BranchState {
    /// The counter.
    pub counter: usize,
    /// Number of events until its companion overflows, and from then on until it does again.
    pub left: u64,
    pub period: u64,
    /// Overflows of its companion that the program does not know of yet.
    pub overflows: u64,
    /// The companion overflows only to try a branch again.
    pub trying: bool,
}

/// An overflow interrupt that has not been injected yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub(crate) enum InterruptState {
    /// There is none.
    None,
    /// It is injected at the next entry.
    Pending,
    /// It waits for the rate limiter.
    Throttled {
        /// The counters whose overflow it is for.
        counters: u64,
        /// How long it still waits.
        wait: Duration,
    },
}

/// A state is not one of this PMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Mismatch {
    /// It is of another kind, version or number of counters.
    #[error("the saved PMU is of another kind or has another number of counters")]
    Shape,
    /// It holds something that no guest can have brought about.
    #[error("the saved PMU's {0} cannot have been saved: the file was changed")]
    Value(&'static str),
}

/// Returns an error unless a register has a value that the guest could have written.
pub(crate) fn check(is_possible: bool, what: &'static str) -> Result<(), Mismatch> {
    if is_possible { Ok(()) } else { Err(Mismatch::Value(what)) }
}
