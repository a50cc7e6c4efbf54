//! A guest for the models' tests: it runs for as long as the test says.

use super::Model;
use crate::source::script::Script;

/// The guest runs, and whoever runs it tells the PMU of alarms; the counts at which it interrupts the guest.
pub fn run(pmu: &mut impl Model<Script>, host: &Script, counts: u64) -> Vec<u64> {
    let mut interrupts = Vec::new();
    host.guest_runs(counts, |left| {
        pmu.unit().look();
        if pmu.unit().take_interrupt() {
            interrupts.push(counts - left);
        }
    });
    interrupts
}
