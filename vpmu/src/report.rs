//! What a vCPU's PMU reports about itself. [`CounterReport`] and [`Statistics`] are a part of the schema that
//! operators' tools read as JSON: fields may be added, and those here keep their names, order and meaning. Times are in
//! seconds.

use serde::{Deserialize, Serialize};

/// Report of a vCPU's PMU.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// All counters, in the order of their numbers.
    pub counters: Vec<CounterReport>,
    /// What was done for the counters so far.
    pub statistics: Statistics,
}

/// Report of one counter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CounterReport {
    /// Number of the counter.
    pub counter: usize,
    /// The guest's event, as `perf` names it; none if the counter is not used.
    pub event: Option<String>,
    /// Value that the guest reads.
    pub value: u64,
    /// State of the counter.
    pub state: State,
    /// Why the host refuses the event of a counter that is [`State::Refused`].
    pub refusal: Option<String>,
    /// Host counter on which the backing event counts, while it is on one. Several counters may share one.
    pub hardware: Option<u32>,
    /// Number of overflows.
    pub overflows: u64,
    /// perf's enabled time of the backing event; none if there is no backing event.
    pub enabled: Option<f64>,
    /// perf's running time of it.
    pub running: Option<f64>,
    /// Number of times that the counter was starved: without hardware while it should count.
    pub starvations: u64,
    /// For how long the counter was starved, at most, up to now.
    pub starved: f64,
    /// Part of the value that is an estimate.
    pub estimated: u64,
}

/// State of a counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// The guest has not selected an event.
    Unused,
    /// The guest has stopped the counter.
    Stopped,
    /// The counter counts.
    Counting,
    /// The counter should count, and others hold the hardware.
    Starved,
    /// The operator has disabled the counter: its value does not change.
    Disabled,
    /// The counter should count, and the host refuses its event.
    Refused,
}

/// Where a counter's backing event is, and for how long it has counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackingReport {
    /// Host counter on which the event counts, while it is on one.
    pub hardware: Option<u32>,
    /// perf's enabled time of the event, in nanoseconds.
    pub enabled_ns: u64,
    /// perf's running time of the event, in nanoseconds.
    pub running_ns: u64,
}

/// What was done for a vCPU's counters since the guest started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Statistics {
    /// Overflows of all counters.
    pub overflows: u64,
    /// Interrupts that the PMU raised.
    pub interrupts: u64,
    /// Interrupts that the policy's cap has delayed.
    pub withheld: u64,
    /// Alarms of the host's events, each of which may be for several counters.
    pub alarms: u64,
    /// Alarms at which no counter had overflowed.
    pub ignored_alarms: u64,
    /// Times that a counter lost its hardware.
    pub starvations: u64,
    /// Overflows that were delayed because they would have come too soon after the last.
    pub clamps: u64,
    /// System calls for the counters.
    pub system_calls: u64,
}
