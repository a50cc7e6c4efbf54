//! Probes the host's PMU: how many counters are free, and which events there are.

use std::io;

use rustix::time::{ClockId, clock_gettime};

use crate::event::PerfEvent;
use crate::host::HostPmu;
use crate::request::Precedence;
use crate::system_calls::SystemCalls;
use vpmu::event::{Event, GenericEvent};

/// An event that is always counted by a general counter. On x86-64 these are branches, for which no processor has a
/// fixed counter. On RISC-V not every processor counts branches. Cycles do there: for an event that interrupts the
/// firmware chooses a programmable counter.
const GENERAL_EVENT: GenericEvent =
    if cfg!(target_arch = "riscv64") { GenericEvent::Cycles } else { GenericEvent::Branches };

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

/// Why no counter was found to be free. [`Obstacle`](crate::Obstacle) tells the user what helps.
#[derive(Debug, thiserror::Error)]
pub enum NotFree {
    /// Others hold all hardware counters.
    #[error("all counters are in use")]
    NoneFree,
    /// Events that should count guests only count the host as well.
    #[error("the PMU does not tell guests from the host")]
    CountsHost,
    /// The host refuses an event.
    #[error(transparent)]
    Refused(#[from] io::Error),
}

/// Finds out how many counters are free on the CPU that this thread runs on. The counters are held until all have been
/// counted: first `least` general counters, then a counter for each event of `fixed` until one has none, then further
/// general counters up to `most`. Must be called on a thread that is in no guest.
///
/// Nobody loses a counter to this, unless others hold all of them: then counters count as free that a pinned event
/// takes from them.
pub fn free_counters(
    pmu: HostPmu,
    least: usize,
    fixed: &[GenericEvent],
    most: usize,
) -> Result<Free, NotFree> {
    match take_counters(pmu, least, fixed, most, Precedence::Flexible) {
        Err(NotFree::NoneFree) => take_counters(pmu, least, fixed, most, Precedence::Pinned),
        found => found,
    }
}

fn take_counters(
    pmu: HostPmu,
    least: usize,
    fixed: &[GenericEvent],
    most: usize,
    precedence: Precedence,
) -> Result<Free, NotFree> {
    const GENERAL: Event = Event::Generic(GENERAL_EVENT);
    let hold = |event, held: &mut _| hold(pmu, event, precedence, held);
    let mut general = Vec::new();
    let mut of_fixed = Vec::new();
    let mut has_more = true;
    while has_more && general.len() < least {
        has_more = hold(GENERAL, &mut general)?;
    }
    if general.is_empty() {
        return Err(NotFree::NoneFree);
    }
    for generic in fixed {
        match hold(Event::Generic(*generic), &mut of_fixed) {
            Ok(true) => {}
            Ok(false) => break,
            Err(NotFree::Refused(error)) if is_missing(&error) => break,
            Err(error) => return Err(error),
        }
    }
    while has_more && general.len() < most {
        has_more = hold(GENERAL, &mut general)?;
    }
    Ok(Free { general: general.len(), fixed: of_fixed.len() })
}

/// Returns whether the host has the event, whether or not a counter is free for it.
pub fn exists(pmu: HostPmu, event: Event) -> bool {
    PerfEvent::open_disabled(pmu, event, SystemCalls::default()).is_ok()
}

/// Returns the names that `perf` has for the kernel's generic hardware events, each with the result of opening it for
/// guests.
pub fn generic_events(pmu: HostPmu) -> Vec<(&'static str, io::Result<()>)> {
    let open = |number| PerfEvent::open_generic_disabled(pmu, number).map(drop);
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

/// Returns true if the error says that the host has no such event.
fn is_missing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV))
}

/// Opens an event and adds it to `held`. Returns false if no counter is free for it.
///
/// Then there are more events of this thread than counters. If a tick of Linux's rotation comes while that is so, it
/// takes the counter from the first of them, which may be one of the host's own perf. So the event is enabled for as
/// short a time as can be, and between two ticks: it is opened before, and closed afterwards.
fn hold(
    pmu: HostPmu,
    event: Event,
    precedence: Precedence,
    held: &mut Vec<PerfEvent>,
) -> Result<bool, NotFree> {
    let event = PerfEvent::open_probe(pmu, event, precedence)?;
    wait_for_a_tick_that_is_near();
    event.enable();
    let Some(counted) = event.counted() else {
        event.disable()?;
        return Ok(false);
    };
    if counted != 0 {
        // This thread is in no guest, so an event that counts guests only must be 0.
        return Err(NotFree::CountsHost);
    }
    held.push(event);
    Ok(true)
}

/// Returns at once, unless a tick of the rotation is so near that it may come before the caller has enabled an event,
/// read it and disabled it. Linux sets the rotation's timer to multiples of its interval on this clock, and the
/// interval is of whole milliseconds.
fn wait_for_a_tick_that_is_near() {
    const INTERVAL: i64 = 1_000_000;
    const NEAR: i64 = 100_000;
    while clock_gettime(ClockId::Monotonic).tv_nsec % INTERVAL >= INTERVAL - NEAR {
        std::hint::spin_loop();
    }
}
