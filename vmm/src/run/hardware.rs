//! Whose a host CPU's counters are, as far as the host lets one know: how many there are is known, and how many of them a
//! guest could have is tried. A CPU that a real-time thread has to itself may never let anybody try: then nothing is known.

use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::thread::CpuSet;
use tally_machine::pmu;
use vpmu_perf::{HostPmu, Obstacle, WATCHDOG, free_counters};

use crate::control::message::Hardware;
use crate::doctor;

/// So long a look is waited for; it takes some milliseconds. Even as many in a row as there may be do not keep a client waiting
/// for longer than it waits.
const PATIENCE: Duration = Duration::from_millis(250);
/// So many looks there may be that have not come to an end.
const MOST_LOOKS: usize = 32;

/// How many there are.
static LOOKS: AtomicUsize = AtomicUsize::new(0);

/// Looks at a CPU, from a thread of its own that goes there.
pub fn examine(cpu: usize, host: HostPmu) -> Option<Hardware> {
    let look = move || {
        let mut there = CpuSet::new();
        (cpu < CpuSet::MAX_CPU).then(|| there.set(cpu))?;
        rustix::thread::sched_setaffinity(None, &there).ok()?;
        let counters = pmu::counters()?;
        let available = match free_counters(host, counters, &[], counters) {
            Ok(free) => free.general,
            Err(Obstacle::NoneFree) => 0,
            Err(_) => return None,
        };
        Some((counters, available))
    };
    let (counters, available) = in_time(look, PATIENCE)?;
    let holders = if available < counters { holders() } else { Vec::new() };
    Some(Hardware { cpu, counters, available, holders })
}

/// What a look has found on a thread of its own, which is left behind if it takes longer than that.
fn in_time<T: Send + 'static>(
    look: impl FnOnce() -> Option<T> + Send + 'static,
    patience: Duration,
) -> Option<T> {
    let counted = Look::begin()?;
    let (sender, found) = mpsc::channel();
    let look = move || {
        let _counted = counted;
        // Perhaps nobody waits any more.
        let _ = sender.send(look());
    };
    thread::Builder::new().name("control".into()).spawn(look).ok()?;
    found.recv_timeout(patience).ok()?
}

/// One of the looks that there may be.
struct Look(());

impl Look {
    fn begin() -> Option<Self> {
        let look = Self(());
        // One too many is over at once, when this is dropped.
        (LOOKS.fetch_add(1, Ordering::Relaxed) < MOST_LOOKS).then_some(look)
    }
}

impl Drop for Look {
    fn drop(&mut self) {
        LOOKS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Who may keep counters to themselves.
fn holders() -> Vec<String> {
    let is_on = |switch| fs::read_to_string(switch).is_ok_and(|value| value.trim() == "1");
    WATCHDOG
        .is_some_and(is_on)
        .then(|| "the NMI watchdog".to_owned())
        .into_iter()
        .chain(doctor::holders())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[test]
    fn a_cpu_that_lets_nobody_look_is_not_waited_for_and_does_not_gather_threads() {
        let (release, released) = mpsc::channel::<()>();
        let released = Arc::new(Mutex::new(released));
        let stuck = || {
            let released = Arc::clone(&released);
            let look = move || {
                let _ = released.lock().unwrap().recv();
                Some(())
            };
            in_time(look, Duration::ZERO)
        };
        for _ in 0..2 * MOST_LOOKS {
            assert_eq!(stuck(), None);
        }
        assert_eq!(LOOKS.load(Ordering::Relaxed), MOST_LOOKS);
        drop(release);
        // The threads that are left behind have to notice first.
        let again = (0..).find_map(|_| in_time(|| Some(7), Duration::from_mins(1)));
        assert_eq!(again, Some(7));
    }
}
