//! The process that opens perf events for a VM's threads ([`vpmu_perf::broker`]), confined as a kind of its own. It is
//! all that keeps the right to count a guest's kernel.

use anyhow::{Context, Result, anyhow};
use vpmu_perf::broker;

use super::{Confinement, Mode, Thread, begin, fail, filter, refusal};

/// Starts the process, for as many threads as a machine of `cpus` vCPUs has that open events at the same time.
pub fn start(mode: Mode, cpus: u32) -> Result<()> {
    /// Threads beside those of the vCPUs: they answer clients, or look for free counters.
    const OTHERS: usize = 2;
    if mode != Mode::Off {
        // What the new process cannot do is told by this one.
        filter::check().map_err(|error| anyhow!(refusal(&error.into())))?;
    }
    let confine = || {
        rustix::thread::set_name(c"events").ok();
        begin(mode).unwrap_or_else(|error| fail(&error));
        Confinement::new(Thread::Broker, Vec::new()).enter();
    };
    broker::start(cpus as usize + OTHERS, confine).context("cannot start the process that opens perf events")
}
