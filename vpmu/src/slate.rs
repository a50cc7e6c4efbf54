//! Register accesses without an exit, while all counters are frozen.
//!
//! A guest's driver freezes its counters with one write, accesses many registers, and thaws them with another. Until the thaw
//! none of these accesses has an effect that anybody could see. So they need not be made: the guest's kernel reads from a
//! [`Page`] in its memory what they would give, and writes there what is to be written (the **slate**); whoever runs the
//! vCPU takes that over when it leaves the guest next, at the latest for the thaw ([`Slate`]).
//!
//! While the kernel handles an overflow even the freeze and the thaw need no exit, if all counters count programs only. They
//! cannot count before the kernel is done, so it makes no difference when they are stopped and set and go on, as long
//! as the host has nothing to do: that is, as long as their next overflows have their alarms. The page says which values of
//! a counter are such, and the thaw leaves the guest if another one was written. Most periods are as long as the one
//! before, and then a sample is one exit to whoever runs the vCPU, for its interrupt. This is for kernels that do what they
//! all do: one that froze its counters for an overflow and went back to a program without the thaw would have that program
//! counted until its next exit.
//!
//! The kernel's part is a little code that the loader adds to it ([`stub`]). It says at each freeze that leaves the guest that
//! it is there, by [`Page::passed`]; a kernel without it never does, and finds everything as ever. Where it did once, and both
//! ends of the page are still as they were left, the memory is taken for its own: a safeguard against a kernel that was
//! loaded later, and no proof. Nothing that a guest writes on its page can do more than its register writes could.
//!
//! One register more is noted there, and accessed all the same: the entry of its APIC that says what an overflow becomes. So
//! nobody need look there at each overflow ([`Slate::entry`]).

pub mod stub;

// Tests execute the part that is the guest's.
#[cfg(all(test, target_arch = "x86_64"))]
mod tests;

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use log::trace;

use crate::Outcome;
use crate::model::Model;
use crate::set::{first, members};
use crate::source::Source;

/// The most registers that can be written there; the status comes behind them.
pub const MOST_SLOTS: usize = 23;
/// What [`Page::passed`] says, and nothing else would by chance.
pub const PASSED: u64 = u64::from_le_bytes(*b"passing!");
/// What [`Page::active`] says while accesses may be made on the page.
pub const ACTIVE: u64 = u64::from_le_bytes(*b"a slate!");
/// The same while they may be from the next freeze on, which itself needs no exit then.
pub const OFFERED: u64 = u64::from_le_bytes(*b"offered!");
/// The same after a thaw that needed none.
pub const THAWED: u64 = u64::from_le_bytes(*b"thawed!!");
/// The same while none may be.
pub const IDLE: u64 = u64::from_le_bytes(*b"not now!");

/// What a vCPU's kernel shares with whoever runs it. The offsets are in the stub, too.
#[repr(C)]
#[derive(Default)]
pub struct Page {
    /// Whether accesses may be made here: [`ACTIVE`], [`OFFERED`], [`THAWED`], [`IDLE`], or nothing that was ever said.
    pub active: AtomicU64,
    /// Set by the kernel when it is about to freeze all counters by an exit.
    pub passed: AtomicU64,
    /// A bit for each slot that was written.
    pub dirty: AtomicU64,
    /// What was written to the register that clears the status.
    pub cleared: AtomicU64,
    /// What can be written to the one that thaws the counters without an exit, or 0.
    pub thaw: AtomicU64,
    /// Whether something was written since the freeze which that cannot be done with.
    pub matters: AtomicU64,
    /// What the kernel has last begun to write to its APIC's entry for overflows.
    pub entry: AtomicU64,
    /// What was written last.
    pub written: [AtomicU64; MOST_SLOTS + 1],
    /// What a read gives; behind the registers' slots that of the status.
    pub shown: [AtomicU64; MOST_SLOTS + 1],
    /// The least that can be written without an effect that matters, and the most.
    pub free: [[AtomicU64; 2]; MOST_SLOTS],
    /// [`IDLE`] since the first use: the memory has not become another kernel's.
    pub end: AtomicU64,
}

impl Page {
    /// How far apart they are: a whole number of cache lines, and a power of two.
    pub const STRIDE: usize = 1024;
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
    /// The counter of the unit's whose value it is, if it is one.
    pub counter: Option<usize>,
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
    used: Use,
    /// Whether all is as it was shown last, but for the status and what counters count.
    is_shown: bool,
    /// What the status said of the hardware when it was shown: that changes even if all counters stand still.
    hardware_changed: bool,
    /// Whether the kernel has made accesses there since the entry was last asked for.
    is_alive: bool,
}

/// What the page is used for, as far as this side knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Use {
    /// Nothing.
    None,
    /// All counters are frozen, and accesses are made there.
    Frozen,
    /// They are held, and may be frozen there.
    Offered,
}

impl Slate {
    /// One that is not in use yet.
    pub fn new(registers: Registers) -> Self {
        Self { registers, used: Use::None, is_shown: false, hardware_changed: false, is_alive: false }
    }

    /// After every exit, before anything else: has all writes take effect that were made on the page. Whether it was looked
    /// what has overflowed by now.
    pub fn take<S: Source>(&mut self, page: &Page, model: &mut dyn Model<S>) -> bool {
        // Nobody else writes while the vCPU does not run, unless the guest's other vCPUs do what they should not.
        let active = page.active.load(Relaxed);
        let (was_offered, is_in_use) = match self.used {
            Use::None => return false,
            Use::Frozen => (false, active == ACTIVE),
            Use::Offered => (true, [OFFERED, ACTIVE, THAWED].contains(&active)),
        };
        if is_in_use && active != OFFERED {
            self.is_alive = true;
            self.make(page, model);
        }
        if was_offered {
            model.unit().let_go();
        }
        match active {
            // Another kernel has taken over the memory.
            _ if !is_in_use => (self.used, self.is_shown) = (Use::None, false),
            ACTIVE if was_offered => {
                page.thaw.store(0, Relaxed);
                self.used = Use::Frozen;
                Self::write(model, self.registers.control, 0);
            }
            ACTIVE => {}
            _ => self.end(page),
        }
        was_offered
    }

    /// What the kernel has noted of its APIC's entry for overflows. It is the same kernel as ever: it has used the page since this
    /// was last asked.
    pub fn entry<'p>(&mut self, page: &'p Page) -> Option<&'p AtomicU64> {
        std::mem::take(&mut self.is_alive).then_some(&page.entry)
    }

    /// The guest accesses a register in the ordinary way: to thaw the counters, or because its kernel does not know of the
    /// page. Until the next freeze nothing is made there.
    pub fn stop(&mut self, page: &Page) {
        if self.used != Use::None {
            self.end(page);
        }
        self.is_shown = false;
    }

    /// Before the guest goes on: if it has said that it freezes all counters, and has, it may use the page from now on, which
    /// has to be its own.
    pub fn give<S: Source>(
        &mut self,
        page: &Page,
        model: &mut dyn Model<S>,
        is_its_own: impl FnOnce() -> bool,
    ) {
        match self.used {
            Use::None => {}
            Use::Frozen if self.hardware_changed != model.unit().hardware_changed() => {
                return self.show(page, model);
            }
            Use::Frozen | Use::Offered => return,
        }
        if page.passed.load(Relaxed) != PASSED {
            return;
        }
        page.passed.store(0, Relaxed);
        if model.unit().control() != 0 {
            return;
        }
        if is_its_own() {
            self.begin(page, model, Use::Frozen);
        }
    }

    /// The same after an alarm, if the next thing that the guest does is to handle the overflow in its kernel.
    pub fn offer<S: Source>(&mut self, page: &Page, model: &mut dyn Model<S>) {
        let is_its_own = [&page.active, &page.end].map(|end| end.load(Relaxed)) == [IDLE; 2];
        if self.used != Use::None || !is_its_own {
            return;
        }
        let Outcome::Value(control) = model.read(self.registers.control) else { return };
        if !model.unit().hold() {
            return;
        }
        self.begin(page, model, Use::Offered);
        page.matters.store(0, Relaxed);
        page.thaw.store(control, Relaxed);
    }

    fn begin<S: Source>(&mut self, page: &Page, model: &mut dyn Model<S>, used: Use) {
        page.dirty.store(0, Relaxed);
        page.cleared.store(0, Relaxed);
        page.thaw.store(0, Relaxed);
        self.show(page, model);
        self.used = used;
        page.active.store(if used == Use::Offered { OFFERED } else { ACTIVE }, Relaxed);
    }

    fn end(&mut self, page: &Page) {
        self.used = Use::None;
        page.active.store(IDLE, Relaxed);
        page.end.store(IDLE, Relaxed);
    }

    fn show<S: Source>(&mut self, page: &Page, model: &mut dyn Model<S>) {
        let (unit, is_shown) = (model.unit(), std::mem::replace(&mut self.is_shown, true));
        self.hardware_changed = unit.hardware_changed();
        let slots = || self.registers.slots.iter().zip(page.shown.iter().zip(&page.free));
        // One that stands still shows what it did.
        let changed = if is_shown { unit.running() } else { unit.all() };
        for (slot, (shown, free)) in slots() {
            if let Some(counter) = slot.counter.filter(|counter| changed & 1 << counter != 0) {
                shown.store(unit.value(counter), Relaxed);
                if let Some(values) = unit.free_values(counter) {
                    free[0].store(*values.start(), Relaxed);
                    free[1].store(*values.end(), Relaxed);
                }
            }
        }
        let mut read = |register, shown: &AtomicU64| {
            let Outcome::Value(value) = model.read(register) else { return 0 };
            shown.store(value, Relaxed);
            value
        };
        read(self.registers.status, &page.shown[self.registers.slots.len()]);
        if !is_shown {
            for (slot, (shown, free)) in slots().filter(|(slot, _)| slot.counter.is_none()) {
                let value = read(slot.register, shown);
                for end in free {
                    end.store(value, Relaxed);
                }
            }
        }
    }

    /// Makes the accesses that were made on the page.
    fn make<S: Source>(&self, page: &Page, model: &mut dyn Model<S>) {
        if page.dirty.load(Relaxed) | page.cleared.load(Relaxed) == 0 {
            return;
        }
        let cleared = page.cleared.swap(0, Relaxed);
        if cleared != 0 {
            Self::write(model, self.registers.clear.register, cleared);
        }
        let dirty = page.dirty.swap(0, Relaxed);
        for index in members(dirty & first(self.registers.slots.len())) {
            let (slot, written) = (&self.registers.slots[index], page.written[index].load(Relaxed));
            match slot.counter {
                Some(counter) => {
                    model.unit().write(counter, written & slot.accepts);
                    trace!("set counter {counter} to {written:#x} without an exit");
                }
                None => Self::write(model, slot.register, written),
            }
        }
    }

    fn write<S: Source>(model: &mut dyn Model<S>, register: u32, value: u64) {
        let outcome = model.write(register, value);
        trace!("wrote {value:#x} to {register:#x} without an exit: {outcome}");
    }
}
