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

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use log::trace;

use crate::Outcome;
use crate::model::Model;
use crate::source::Source;

/// The most registers that can be written there; the status comes behind them.
pub const MOST_SLOTS: usize = 23;
/// What [`Page::passed`] says, and nothing else would by chance.
pub const PASSED: u64 = u64::from_le_bytes(*b"passing!");
/// What [`Page::active`] says: as long as it does, the memory has not become another kernel's.
pub const ACTIVE: u64 = u64::from_le_bytes(*b"a slate!");

/// What a vCPU's kernel shares with whoever runs it. The offsets are in the stub, too.
#[repr(C)]
#[derive(Default)]
pub struct Page {
    /// [`ACTIVE`] while accesses may be made here, or else 0.
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
    /// What the status said of the hardware when it was shown: that changes even if all counters stand still.
    hardware_changed: bool,
}

impl Slate {
    /// One that is not in use yet.
    pub fn new(registers: Registers) -> Self {
        Self { registers, active: false, hardware_changed: false }
    }

    /// After every exit, before anything else: has all writes take effect that were made on the page.
    pub fn take<S: Source>(&mut self, page: &Page, model: &mut dyn Model<S>) {
        if !self.active {
            return;
        }
        if page.active.load(Relaxed) != ACTIVE {
            // Another kernel has taken over the memory.
            self.active = false;
            return;
        }
        // Nobody else writes while the vCPU does not run, unless the guest's other vCPUs do what they should not.
        if page.dirty.load(Relaxed) | page.cleared.load(Relaxed) == 0 {
            return;
        }
        let mut write = |register: u32, value: u64| {
            let outcome = model.write(register, value);
            trace!("wrote {value:#x} to {register:#x} without an exit: {outcome}");
        };
        let cleared = page.cleared.swap(0, Relaxed);
        if cleared != 0 {
            write(self.registers.clear.register, cleared);
        }
        let dirty = page.dirty.swap(0, Relaxed);
        for (slot, (index, written)) in self.registers.slots.iter().zip((0..).zip(&page.written)) {
            if dirty & 1 << index != 0 {
                write(slot.register, written.load(Relaxed));
            }
        }
    }

    /// The guest accesses a register in the ordinary way: to thaw the counters, or because its kernel does not know of the
    /// page. Until the next freeze nothing is made there.
    pub fn stop(&mut self, page: &Page) {
        if std::mem::take(&mut self.active) {
            page.active.store(0, Relaxed);
        }
    }

    /// Before the guest goes on: if it has said that it freezes all counters, and has, it may use the page from now on, which
    /// has to be its own.
    pub fn give<S: Source>(
        &mut self,
        page: &Page,
        model: &mut dyn Model<S>,
        is_its_own: impl FnOnce() -> bool,
    ) {
        if self.active {
            if self.hardware_changed != model.unit().hardware_changed() {
                self.show(page, model);
            }
            return;
        }
        if page.passed.load(Relaxed) != PASSED {
            return;
        }
        page.passed.store(0, Relaxed);
        if model.unit().control() != 0 {
            return;
        }
        if is_its_own() {
            page.dirty.store(0, Relaxed);
            page.cleared.store(0, Relaxed);
            self.show(page, model);
            self.active = true;
            page.active.store(ACTIVE, Relaxed);
        }
    }

    fn show<S: Source>(&mut self, page: &Page, model: &mut dyn Model<S>) {
        let registers = self.registers.slots.iter().map(|slot| slot.register);
        for (register, shown) in registers.chain([self.registers.status]).zip(&page.shown) {
            if let Outcome::Value(value) = model.read(register) {
                shown.store(value, Relaxed);
            }
        }
        self.hardware_changed = model.unit().hardware_changed();
    }
}
