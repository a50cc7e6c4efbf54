//! Reports on a vCPU's PMU for the operator. They can be serialized.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// State of a vCPU's PMU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// The counters, by their numbers.
    pub counters: Vec<CounterReport>,
    /// Statistics since the guest started.
    pub statistics: Statistics,
}

impl Report {
    /// Returns the hardware counters of the host that count for this vCPU. Several of its counters may share one.
    pub fn held(&self) -> BTreeSet<u32> {
        self.counters.iter().filter_map(|counter| counter.backing?.hardware).collect()
    }
}

/// State of one counter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CounterReport {
    /// The event that the guest has selected, with the name that `perf` has for it.
    pub event: Option<String>,
    /// Value that a read by the guest returns.
    pub value: u64,
    /// What the counter does.
    pub state: State,
    /// The host's event that backs the counter, and perhaps others that count the same.
    pub backing: Option<BackingReport>,
    /// Number of overflows.
    pub overflows: u64,
    /// Number of times that the counter was without hardware.
    pub starvations: u64,
    /// Longest time that the counter can have been without hardware up to now, in nanoseconds.
    pub starved_ns: u64,
    /// Number of counts in `value` that are an estimate.
    pub estimated: u64,
}

/// What a counter does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// The guest does not use it.
    Unused,
    /// The guest has stopped it.
    Stopped,
    /// It counts.
    Counting,
    /// It should count but is without hardware, which others hold.
    Starved,
    /// The operator has disabled it, so it stands still.
    Disabled,
    /// It should count but the host refuses its event, for this reason.
    Refused(String),
}

/// State of the host's event that backs counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackingReport {
    /// Number of the hardware counter that the event is on, if it is on one.
    pub hardware: Option<u32>,
    /// Time for which the event was enabled, in nanoseconds.
    pub enabled_ns: u64,
    /// Time for which the event was on a hardware counter, in nanoseconds.
    pub running_ns: u64,
}

/// Statistics of a vCPU's PMU since the guest started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Statistics {
    /// Number of overflows of all counters.
    pub overflows: u64,
    /// Number of interrupts that the PMU raised.
    pub interrupts: u64,
    /// Number of interrupts that the policy's rate limit delayed.
    pub withheld: u64,
    /// Number of expired alarms. One alarm may be for several counters.
    pub alarms: u64,
    /// Number of expired alarms at which no counter had overflowed.
    pub ignored_alarms: u64,
    /// Number of times that a counter lost its hardware.
    pub starvations: u64,
    /// Number of overflows that were delayed because the policy's least period since the last one was not over.
    pub clamps: u64,
    /// Number of system calls made for the counters.
    pub system_calls: u64,
}
