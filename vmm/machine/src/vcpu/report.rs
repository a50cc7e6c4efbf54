//! What a vCPU's own thread reports: with vpmu's report of a counter a part of the schema that operators' tools read as
//! JSON. Fields may be added; those here keep their names, order and meaning.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use vpmu::report::{CounterReport, Statistics};

use super::exits::{Exits, Share};

/// What a vCPU's own thread reports.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VcpuReport {
    /// Number of the vCPU.
    pub vcpu: u8,
    /// Thread id.
    pub thread: i32,
    /// The counters of the guest's PMU; none if the PMU is not Tally's.
    pub counters: Vec<CounterReport>,
    /// What was done for the counters; none if the PMU is not Tally's.
    pub statistics: Option<Statistics>,
    /// Exits to Tally, by reason.
    pub exits: Exits,
    /// Time that the PMU takes. Not a part of the schema.
    #[serde(skip)]
    pub share: Share,
}

impl VcpuReport {
    /// Returns the host counters on which this vCPU's counters count. Several counters may share one.
    pub fn held(&self) -> BTreeSet<u32> {
        self.counters.iter().filter_map(|counter| counter.hardware).collect()
    }
}
