//! A guest for the tests of the models.

use super::Model;
use crate::source::script::Script;

/// Runs the guest for `counts` counts of each event, and handles alarms as a VMM does. Returns the counts at which the
/// PMU interrupted the guest.
pub fn run(pmu: &mut impl Model<Script>, host: &Script, counts: u64) -> Vec<u64> {
    let mut interrupts = Vec::new();
    host.guest_runs(counts, |left| {
        pmu.unit().update_all();
        if pmu.unit().take_interrupt() {
            interrupts.push(counts - left);
        }
    });
    interrupts
}
