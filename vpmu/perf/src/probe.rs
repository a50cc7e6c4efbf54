//! Probes the host's PMU: how many counters are free, and which events there are.

use std::io;

use crate::event::PerfEvent;
use crate::host::HostPmu;
use crate::obstacle::Obstacle;
use vpmu::event::{Event, Meaning};

/// An event that is always counted by a general counter. On x86-64 these are branches, for which no processor has a
/// fixed counter. On RISC-V not every processor counts branches. Cycles do there: for an event that interrupts the
/// firmware chooses a programmable counter.
const GENERAL_EVENT: Meaning =
    if cfg!(target_arch = "riscv64") { Meaning::Cycles } else { Meaning::Branches };

/// Hardware counters that are free at the same time. Others may hold some all the time: the NMI watchdog holds one on
/// every CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Free {
    /// Number of general counters, which can count any event.
    pub general: usize,
    /// Number of the requested fixed events that have a counter beside the general ones. These are the first of the
    /// request.
    pub fixed: usize,
}

/// Finds out how many counters are free on the CPU that this thread runs on. The counters are held until all have been
/// counted: first `least` general counters, then a counter for each event of `fixed` until one has none, then further
/// general counters up to `most`. Must be called on a thread that is in no guest.
pub fn free_counters(pmu: HostPmu, least: usize, fixed: &[Meaning], most: usize) -> Result<Free, Obstacle> {
    const GENERAL: Event = Event::Meaning(GENERAL_EVENT);
    let mut general = Vec::new();
    let mut held = Vec::new();
    while general.len() < least && hold(pmu, GENERAL, &mut general)? {}
    if general.is_empty() {
        return Err(Obstacle::NoneFree);
    }
    for meaning in fixed {
        match hold(pmu, Event::Meaning(*meaning), &mut held) {
            Ok(true) => {}
            Ok(false) | Err(Obstacle::NoPmu(_)) => break,
            Err(obstacle) => return Err(obstacle),
        }
    }
    while general.len() < most && hold(pmu, GENERAL, &mut general)? {}
    Ok(Free { general: general.len(), fixed: held.len() })
}

/// Returns whether the host has the event, whether or not a counter is free for it.
pub fn exists(pmu: HostPmu, event: Event) -> bool {
    PerfEvent::open_probe(pmu, event).is_ok()
}

/// Returns the names that `perf` has for the kernel's generic hardware events, each with the result of opening it for
/// guests.
pub fn generic_events(pmu: HostPmu) -> Vec<(&'static str, io::Result<()>)> {
    let open = |number| PerfEvent::open_generic_probe(pmu, number).map(drop);
    (0..).zip(GENERIC).map(|(number, name)| (name, open(number))).collect()
}

/// Names of the generic events, in the order of their numbers (`enum perf_hw_id`).
const GENERIC: [&str; 10] = [
    "cycles",
    "instructions",
    "cache-references",
    "cache-misses",
    "branches",
    "branch-misses",
    "bus-cycles",
    "stalled-cycles-frontend",
    "stalled-cycles-backend",
    "ref-cycles",
];

/// Opens an event and adds it to `held`. Returns false if no counter is free for it.
fn hold(pmu: HostPmu, event: Event, held: &mut Vec<PerfEvent>) -> Result<bool, Obstacle> {
    let event = PerfEvent::open_probe(pmu, event).map_err(|error: io::Error| Obstacle::from_error(&error))?;
    match event.counted() {
        None => Ok(false),
        Some(0) => {
            held.push(event);
            Ok(true)
        }
        // This thread is in no guest, so an event that counts guests only must be 0.
        Some(_) => Err(Obstacle::CountsHost),
    }
}
