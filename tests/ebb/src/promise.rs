//! What the checks of promises have in common.

use std::fmt::Display;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use tally_ebb::{Branch, Branches, Counter, Error, Event, Handler};

/// A number of events between branches that is longer than the longest delay of an interrupt on a simulated processor
/// that misbehaves as real ones do: each overflow is a branch of its own there, too.
pub const PERIOD: u64 = 30_011;

/// What a check has measured, or what was wrong.
pub type Verdict = Result<String, Failure>;

/// What was wrong.
#[derive(Debug)]
pub struct Failure(pub String);

impl<E: Display> From<E> for Failure {
    fn from(error: E) -> Self {
        Self(error.to_string())
    }
}

/// Returns the program's second argument, if it has a number there.
pub fn number() -> Option<u64> {
    std::env::args().nth(2)?.parse().ok()
}

/// Returns an error unless two values are equal.
pub fn equal<T: PartialEq + Copy + std::fmt::Debug>(what: &str, is: T, expected: T) -> Result<(), Failure> {
    if is == expected { Ok(()) } else { Err(Failure(format!("{what}: {is:?} instead of {expected:?}"))) }
}

/// Returns an error unless something is true.
pub fn holds(what: &str, is_true: bool) -> Result<(), Failure> {
    if is_true { Ok(()) } else { Err(Failure(format!("not true: {what}"))) }
}

/// What the handler has seen.
pub struct Seen {
    pub branches: AtomicU64,
    /// Number of handlers that have begun and not ended.
    pub depth: AtomicU64,
    /// Greatest such number.
    pub deepest: AtomicU64,
    /// Address at the last branch.
    pub instruction: AtomicU64,
}

impl Seen {
    pub const fn nothing() -> Self {
        let [branches, depth, deepest, instruction] = [const { AtomicU64::new(0) }; 4];
        Self { branches, depth, deepest, instruction }
    }

    /// Number of branches.
    pub fn branches(&self) -> u64 {
        self.branches.load(Relaxed)
    }

    /// Checks that there was a branch for each overflow. One that came while the event was being disabled still waits.
    pub fn all_taken(&self, branches: &Branches, counter: &Counter) -> Result<(), Failure> {
        equal("branches", self.branches() + u64::from(branches.is_pending()), counter.overflows())
    }

    /// Gives the calling thread branches that are noted here.
    pub fn branched(&'static self) -> Result<Branches, Error> {
        self.handled_by(note)
    }

    /// The same, with a handler that gets the address of this value, and does no more than [`note`] and run a loop.
    pub fn handled_by(&'static self, handler: Handler) -> Result<Branches, Error> {
        // SAFETY: the handler only counts, in memory that is never freed.
        unsafe { Branches::new(handler, std::ptr::from_ref(self).expose_provenance()) }
    }
}

extern "C" fn note(branch: &Branch, seen: usize) {
    note_with(branch, seen, |_| {});
}

/// Notes the first hundred branches, with handlers that take longer than a period of 100,000.
pub extern "C" fn note_slowly(branch: &Branch, seen: usize) {
    note_with(branch, seen, |before| {
        if before < 100 {
            crate::code::spin(100_000);
        }
    });
}

fn note_with(branch: &Branch, seen: usize, work: impl FnOnce(u64)) {
    // SAFETY: the argument is the address of a static.
    let seen = unsafe { &*std::ptr::with_exposed_provenance::<Seen>(seen) };
    let depth = seen.depth.fetch_add(1, Relaxed) + 1;
    seen.deepest.fetch_max(depth, Relaxed);
    let before = seen.branches.fetch_add(1, Relaxed);
    seen.instruction.store(branch.instruction, Relaxed);
    work(before);
    seen.depth.fetch_sub(1, Relaxed);
}

/// Returns the event of this processor's cycles.
pub fn cycles() -> Event {
    if is_intel() { Event::INTEL_CYCLES } else { Event::AMD_CYCLES }
}

/// Returns the event of this processor's branches.
pub fn jumps() -> Event {
    if is_intel() { Event::INTEL_BRANCHES } else { Event::AMD_BRANCHES }
}

fn is_intel() -> bool {
    std::arch::x86_64::__cpuid(0).ecx == u32::from_le_bytes(*b"ntel")
}
