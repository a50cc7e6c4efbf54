//! What a vCPU's PMU has to say of itself, in words and numbers that can be passed on.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// A vCPU's PMU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Its counters, in their order.
    pub counters: Vec<CounterReport>,
    /// What it has done so far.
    pub statistics: Statistics,
}

impl Report {
    /// Which of the host's counters are held. Several counters may share one.
    pub fn held(&self) -> BTreeSet<u32> {
        self.counters.iter().filter_map(|counter| counter.backing?.hardware).collect()
    }
}

/// One counter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CounterReport {
    /// What the guest has it count, as `perf` names that.
    pub event: Option<String>,
    /// What it shows.
    pub value: u64,
    /// How it does.
    pub state: State,
    /// What counts for it, and for others that count the same.
    pub backing: Option<BackingReport>,
    /// How often it has overflowed.
    pub overflows: u64,
    /// How often it was without hardware.
    pub starvations: u64,
    /// For how long it was so, at most, in nanoseconds, up to now.
    pub starved_ns: u64,
    /// How much of what it shows is an estimate.
    pub estimated: u64,
}

/// How a counter does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// The guest has no use for it.
    Unused,
    /// The guest has stopped it.
    Stopped,
    /// It counts.
    Counting,
    /// It should count, and others hold the hardware.
    Starved,
    /// The operator has switched it off, so that it stands still.
    Disabled,
    /// It should count, and the host refuses its event, for this reason.
    Refused(String),
}

/// What counts for counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackingReport {
    /// Which of the host's counters, while it is on one.
    pub hardware: Option<u32>,
    /// For how long the host was to count, in nanoseconds.
    pub enabled_ns: u64,
    /// For how long it did.
    pub running_ns: u64,
}

/// What was done for a vCPU's counters since the guest started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Statistics {
    /// Overflows of all counters.
    pub overflows: u64,
    /// Times that the PMU asked for an interrupt.
    pub interrupts: u64,
    /// Times that it had to wait with that, because there had been too many.
    pub withheld: u64,
    /// Alarms of the host, each of which may be for several counters.
    pub alarms: u64,
    /// Those at which no counter had overflowed.
    pub ignored_alarms: u64,
    /// Times that a counter lost its hardware.
    pub starvations: u64,
    /// Times that an overflow was put off, because it would have come too soon after the last.
    pub clamps: u64,
    /// System calls for the counters.
    pub system_calls: u64,
}
