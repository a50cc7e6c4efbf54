//! Targets of log messages that programs and users select by name. Other messages have the path of their module as
//! target.

/// Target of messages about the guest's counters, which also go into the event log.
pub const COUNTERS: &str = "tally::counters";
/// Target of the guest's accesses to its PMU, the same on all architectures, because users name it in filters.
pub const ACCESSES: &str = "tally::pmu";
/// Target of what a vCPU's PMU did in all, which is said when the machine ends.
pub const STATISTICS: &str = "tally::statistics";
