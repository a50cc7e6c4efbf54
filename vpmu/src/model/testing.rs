//! A guest for the tests of the models.

use super::Model;
use crate::ebb;
use crate::source::script::Script;

/// Runs the guest for `counts` counts of each event, and handles alarms as a VMM does. Returns the counts at which the
/// PMU interrupted the guest.
pub fn run(pmu: &mut impl Model<Script>, host: &Script, counts: u64) -> Vec<u64> {
    let mut interrupts = Vec::new();
    host.guest_runs(counts, |left| {
        pmu.unit().alarm(false);
        if pmu.unit().take_interrupt() {
            interrupts.push(counts - left);
        }
    });
    interrupts
}

/// Returns whether a select register counts in user mode or in the kernel; with the flag of event-based branches, it
/// counts in user mode only.
pub fn counts_in_a_mode(select: u64) -> bool {
    let has_flag = select & (ebb::FLAG | 1 << 23) == ebb::FLAG;
    select & if has_flag { 1 << 16 } else { 3 << 16 } != 0
}
