//! What counts for a vCPU: perf events of the host, of the thread that runs it.

use std::io;
use std::sync::Once;

use log::warn;
use vpmu_perf::{HostPmu, MORE_PAGES, PerfEvents};

use crate::target::COUNTERS;

/// Returns the source of the counts of a vCPU that this thread runs.
pub fn perf_events(pmu: HostPmu) -> PerfEvents {
    PerfEvents::new(pmu).on_unmapped_page(say_once)
}

fn say_once(reason: &io::Error) {
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        warn!(
            target: COUNTERS,
            "the host maps no more pages of counters ({reason}): counts stay exact, but each reading is a system call; \
             `{MORE_PAGES}` lets users map more"
        );
    });
}
