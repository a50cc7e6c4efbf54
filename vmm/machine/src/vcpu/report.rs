//! A vCPU's report. Together with vpmu's counter reports it is a part of the JSON schema that operators' tools read.
//! Fields may be added, but existing fields keep their names, order and meaning.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use vpmu::report::{CounterReport, Statistics};

use super::exits::{Exits, Share};

/// Report of a vCPU, made by its own thread.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VcpuReport {
    pub vcpu: u8,
    pub thread: i32,
    /// Counters of the guest's PMU. Empty if Tally does not emulate the PMU.
    pub counters: Vec<CounterReport>,
    /// Statistics of the PMU. `None` if Tally does not emulate the PMU.
    pub statistics: Option<Statistics>,
    /// Exits to Tally, by reason.
    pub exits: Exits,
    /// Time that exits for the PMU take. Not a part of the schema.
    #[serde(skip)]
    pub share: Share,
    /// Host CPU on which the thread runs. Not a part of the schema.
    #[serde(skip)]
    pub cpu: usize,
}

impl VcpuReport {
    /// Returns the numbers of the host counters that back this vCPU's counters. Several counters may share a host
    /// counter.
    pub fn held(&self) -> BTreeSet<u32> {
        self.counters.iter().filter_map(|counter| counter.hardware).collect()
    }
}
