//! Probes how many of a host CPU's counters are held. The number of counters is known, and the number of available ones
//! is found out by opening events on that CPU. If a real-time thread never leaves the CPU, the probing thread cannot
//! run there, and the probe times out.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::thread::CpuSet;
use tally_machine::{VcpuReport, pmu};
use vpmu_perf::{HostPmu, NotFree, free_counters};

use crate::protocol::status::Hardware;

/// Timeout for a probe, which takes some milliseconds. It is short enough that a client gets its answer in
/// time even after [`MAX_PROBES`] timeouts in a row.
const TIMEOUT: Duration = Duration::from_millis(250);
/// Maximum number of probes that have not ended.
const MAX_PROBES: usize = 32;

/// Number of probes that have not ended.
static PROBES: AtomicUsize = AtomicUsize::new(0);

/// A host CPU's counters, as they were when the CPU was probed.
#[derive(Debug, Clone, Copy)]
pub struct CpuCounters {
    pub cpu: usize,
    pub counters: usize,
    /// Number of counters that others do not hold. The guest may hold some of these.
    pub available: usize,
}

impl CpuCounters {
    /// Returns who holds the counters while a vCPU holds those that it reports.
    pub fn held_by(&self, vcpu: &VcpuReport) -> Hardware {
        let Self { cpu, counters, available, .. } = *self;
        let held: Vec<u32> = vcpu.held().into_iter().collect();
        let free = available.saturating_sub(held.len());
        let others = counters.saturating_sub(free + held.len());
        Hardware { cpu, counters, held, free, others, holders: Vec::new() }
    }
}

/// Probes a CPU with a thread that is moved there. Returns `None` if this fails or times out.
pub fn probe_cpu(cpu: usize, host: HostPmu) -> Option<CpuCounters> {
    let probe = move || {
        let mut there = CpuSet::new();
        (cpu < CpuSet::MAX_CPU).then(|| there.set(cpu))?;
        rustix::thread::sched_setaffinity(None, &there).ok()?;
        let counters = pmu::host_counters()?;
        let available = match free_counters(host, counters, &[], counters) {
            Ok(free) => free.general,
            Err(NotFree::NoneFree) => 0,
            Err(_) => return None,
        };
        Some((counters, available))
    };
    let (counters, available) = in_time(probe, TIMEOUT)?;
    Some(CpuCounters { cpu, counters, available })
}

/// Runs `probe` on a thread of its own. A thread that exceeds the timeout is not waited for any longer.
fn in_time<T: Send + 'static>(
    probe: impl FnOnce() -> Option<T> + Send + 'static,
    timeout: Duration,
) -> Option<T> {
    let counted = Probe::begin()?;
    let (sender, found) = mpsc::channel();
    let probe = move || {
        let _counted = counted;
        // Sending fails after the timeout, because the receiver was dropped.
        let _ = sender.send(probe());
    };
    thread::Builder::new().name("control".into()).spawn(probe).ok()?;
    found.recv_timeout(timeout).ok()?
}

/// Counts one of the [`MAX_PROBES`] until it is dropped.
struct Probe(());

impl Probe {
    fn begin() -> Option<Self> {
        let probe = Self(());
        // If there are too many, the new one is dropped, which reverts the increment.
        (PROBES.fetch_add(1, Ordering::Relaxed) < MAX_PROBES).then_some(probe)
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        PROBES.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[test]
    fn probes_that_time_out_do_not_pile_up_threads() {
        let (release, released) = mpsc::channel::<()>();
        let released = Arc::new(Mutex::new(released));
        let stuck = || {
            let released = Arc::clone(&released);
            let probe = move || {
                let _ = released.lock().unwrap().recv();
                Some(())
            };
            in_time(probe, Duration::ZERO)
        };
        for _ in 0..2 * MAX_PROBES {
            assert_eq!(stuck(), None);
        }
        assert_eq!(PROBES.load(Ordering::Relaxed), MAX_PROBES);
        drop(release);
        // The threads that were left behind have to end first.
        let again = (0..).find_map(|_| in_time(|| Some(7), Duration::from_mins(1)));
        assert_eq!(again, Some(7));
    }
}
