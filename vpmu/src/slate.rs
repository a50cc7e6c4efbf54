//! Register accesses without an exit, while all counters are frozen.
//!
//! A guest's driver freezes its counters with one write, accesses many registers, and thaws them with another. Until the thaw
//! none of these accesses has an effect that anybody could see. So they need not be made: the guest's kernel reads from a
//! [`Page`] in its memory what they would give, and writes there what is to be written (the **slate**); whoever runs the
//! vCPU takes that over when it leaves the guest next, at the latest for the thaw ([`Slate`]).
//!
//! The kernel's part is a little code that the loader adds to it ([`stub`]). It says at each freeze that it is there, by
//! [`Page::passed`]; a kernel without it, or another one in the same memory, never does, and finds everything as ever. Nothing
//! that a guest writes on its page can do more than its register writes could.

pub mod stub;

#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU64, Ordering};

use log::trace;

use crate::model::Model;
use crate::source::Source;

/// The most registers that can be written there; the status comes behind them.
pub const MOST_SLOTS: usize = 23;
/// What [`Page::passed`] says.
pub const PASSED: u64 = u64::from_le_bytes(*b"passing!");

/// What a vCPU's kernel shares with whoever runs it. The offsets are in the stub, too.
#[repr(C)]
#[derive(Default)]
pub struct Page {
    /// Not 0 while accesses may be made here.
    pub active: AtomicU64,
    /// Set by the kernel when it is about to freeze all counters.
    pub passed: AtomicU64,
    /// A bit for each slot that was written.
    pub dirty: AtomicU64,
    /// What was written to the register that clears the status.
    pub cleared: AtomicU64,
    /// What was written last.
    pub written: [AtomicU64; MOST_SLOTS + 1],
    /// What a read gives; behind the registers' slots that of the status.
    pub shown: [AtomicU64; MOST_SLOTS + 1],
}

impl Page {
    /// How far apart they are: a whole number of cache lines, and a power of two.
    pub const STRIDE: usize = 512;
}

const _: () = assert!(size_of::<Page>() <= Page::STRIDE);

/// A register that can be read and written there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// Its number.
    pub register: u32,
    /// The bits that can be set without a fault, and without an effect that cannot wait.
    pub accepts: u64,
    /// The bits that a read gives again.
    pub keeps: u64,
}

/// Counters as RDPMC has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counters {
    /// The number of the first.
    pub first: u32,
    /// How many there are.
    pub count: u32,
    /// Its slot.
    pub slot: u32,
    /// How far from one to the next.
    pub stride: Stride,
}

/// From one counter's slot to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stride {
    /// They are one behind the other.
    One,
    /// Each has its select in front of it.
    Two,
}

/// The registers of a PMU that can be frozen as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Registers {
    /// The one that freezes them by a write of 0.
    pub control: u32,
    /// The one that tells of overflows.
    pub status: u32,
    /// The one that clears those, which always reads as something else.
    pub clear: Slot,
    /// The others, those with numbers that follow each other side by side. They are written in this order.
    pub slots: Vec<Slot>,
    /// Counters by their numbers for RDPMC.
    pub counters: Vec<Counters>,
}

impl Registers {
    /// Registers whose numbers and slots follow each other: first number, first slot, how many.
    fn runs(&self) -> Vec<(u32, u32, u32)> {
        let mut runs: Vec<(u32, u32, u32)> = Vec::new();
        for (index, slot) in (0..).zip(&self.slots) {
            match runs.last_mut() {
                Some((first, _, count)) if *first + *count == slot.register => *count += 1,
                _ => runs.push((slot.register, index, 1)),
            }
        }
        runs
    }
}

/// One vCPU's slate, on the side of whoever runs it.
pub struct Slate {
    registers: Registers,
    active: bool,
    /// Whether what is shown may not be what the registers hold.
    stale: bool,
}

impl Slate {
    /// One that is not in use yet.
    pub fn new(registers: Registers) -> Self {
        Self { registers, active: false, stale: false }
    }

    /// After every exit, before anything else: has all writes take effect that were made on the page.
    pub fn take<S: Source>(&mut self, page: &Page, model: &mut dyn Model<S>) {
        // Nobody else writes while the vCPU does not run, unless the guest's other vCPUs do what they should not.
        if !self.active || page.dirty.load(Ordering::Relaxed) | page.cleared.load(Ordering::Relaxed) == 0 {
            return;
        }
        self.stale = true;
        let mut write = |register: u32, value: u64| {
            let outcome = model.write(register, value);
            trace!("wrote {value:#x} to {register:#x} without an exit: {outcome}");
        };
        let cleared = page.cleared.swap(0, Ordering::Relaxed);
        if cleared != 0 {
            write(self.registers.clear.register, cleared);
        }
        let dirty = page.dirty.swap(0, Ordering::Relaxed);
        for (slot, (index, written)) in self.registers.slots.iter().zip((0..).zip(&page.written)) {
            if dirty & 1 << index != 0 {
                write(slot.register, written.load(Ordering::Relaxed));
            }
        }
    }

    /// The guest has written a register in the ordinary way.
    pub fn is_stale(&mut self) {
        self.stale = true;
    }

    /// Before the guest goes on: lets it use the page from now on, or no longer. Not before `belongs` has said that the
    /// page is that of this vCPU.
    pub fn give<S: Source>(&mut self, page: &Page, model: &mut dyn Model<S>, belongs: impl FnOnce() -> bool) {
        if model.unit().control() != 0 {
            if self.active {
                self.active = false;
                page.active.store(0, Ordering::Relaxed);
            }
            return;
        }
        if self.active {
            if !self.stale {
                return;
            }
        } else {
            if page.passed.load(Ordering::Relaxed) != PASSED {
                return;
            }
            page.passed.store(0, Ordering::Relaxed);
            if !belongs() {
                return;
            }
            page.dirty.store(0, Ordering::Relaxed);
            page.cleared.store(0, Ordering::Relaxed);
        }
        let registers = self.registers.slots.iter().map(|slot| slot.register);
        for (register, shown) in registers.chain([self.registers.status]).zip(&page.shown) {
            if let crate::Outcome::Value(value) = model.read(register) {
                shown.store(value, Ordering::Relaxed);
            }
        }
        (self.active, self.stale) = (true, false);
        page.active.store(1, Ordering::Relaxed);
    }
}
