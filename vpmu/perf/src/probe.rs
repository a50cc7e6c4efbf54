//! What the host really has to give.

use std::io;

use crate::event::PerfEvent;
use crate::host::HostPmu;
use crate::obstacle::Obstacle;
use vpmu::event::{Event, Meaning};

/// What any counter can count. On x86-64 no processor has a fixed counter for branches. On RISC-V not every one counts
/// them, and for cycles the firmware takes a counter that interrupts, as all of these are to.
const ANYWHERE: Meaning = if cfg!(target_arch = "riscv64") { Meaning::Cycles } else { Meaning::Branches };

/// Counters that find room on the PMU at once. Others may hold some all the time: the NMI watchdog holds one on every CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Free {
    /// For any events.
    pub general: usize,
    /// Of those that were asked for by what they count, so many from the first on.
    pub fixed: usize,
}

/// Finds room for so many general counters, for those of `fixed` that the host has and holds beside them, and then for
/// more general ones, up to `most`.
pub fn free_counters(pmu: HostPmu, least: usize, fixed: &[Meaning], most: usize) -> Result<Free, Obstacle> {
    const GENERAL: Event = Event::Meaning(ANYWHERE);
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

/// Whether the host has such an event at all.
pub fn exists(pmu: HostPmu, event: Event) -> bool {
    PerfEvent::sample(pmu, event).is_ok()
}

/// The kernel's generic events of processors, as `perf` has them, and what it says to counting each in guests.
pub fn generic_events(pmu: HostPmu) -> Vec<(&'static str, io::Result<()>)> {
    let counts = |number| PerfEvent::generic(pmu, number).map(drop);
    (0..).zip(GENERIC).map(|(number, name)| (name, counts(number))).collect()
}

/// In the order of their numbers (`enum perf_hw_id`).
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

/// Adds an event that is on the PMU, if there is room for it.
fn hold(pmu: HostPmu, event: Event, held: &mut Vec<PerfEvent>) -> Result<bool, Obstacle> {
    let event = PerfEvent::sample(pmu, event).map_err(|error: io::Error| Obstacle::from_error(&error))?;
    match event.counted() {
        None => Ok(false),
        Some(0) => {
            held.push(event);
            Ok(true)
        }
        // This thread is in no guest.
        Some(_) => Err(Obstacle::CountsHost),
    }
}
