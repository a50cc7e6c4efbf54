//! The targets of log messages that programs and users select by name. Other messages have the path of their module.

/// The target of what concerns the guest's counters, and belongs into their log.
pub const COUNTERS: &str = "tally::counters";
/// The target of the guest's accesses to its PMU, whichever architecture's: users name it.
pub const ACCESSES: &str = "tally::pmu";
