//! Register accesses without an exit, while all counters are frozen.
//!
//! A guest's driver freezes its counters with one write, accesses many registers, and thaws them with another write. Until the
//! thaw none of these accesses has a visible effect, so none of them has to leave the guest: the guest's kernel reads the
//! registers from a [`Page`] in its memory and writes there what is to be written. The VMM applies these writes at the next
//! exit, at the latest at the thaw ([`crate::VirtualPmu::share_page`]).
//!
//! While the kernel handles an overflow, even the freeze and the thaw need no exit, provided that all counters count user mode
//! only. Such counters stand still until the kernel is done, so it makes no difference when they are stopped, written and
//! started, unless the host has something to do: unless a counter's next overflow needs an alarm that is not set. The page
//! lists for each counter the values that need no new alarm, and the thaw leaves the guest if another value was written. Most
//! periods are as long as the one before, and then a sample is one exit to the VMM, for its interrupt. This relies on what all
//! kernels do. A kernel that froze its counters for an overflow and returned to a program without a thaw would have that
//! program counted until its next exit.
//!
//! The guest's side is a little code that the loader adds to the kernel (the crate `vpmu-retarget` has it). At each freeze that leaves the guest it
//! sets [`Page::passed`]; a kernel without the code never does, and nothing changes for it. The VMM uses the memory as a shared
//! page once the code has set that word and both ends of the page are as the VMM left them. That is a safeguard against a
//! kernel that was loaded later, not a proof. Nothing that a guest writes on its page can do more than its register writes
//! could.
//!
//! The code notes one more register there, which it also accesses in the ordinary way: the APIC's LVT entry for overflows. So
//! the VMM need not ask KVM for the entry at each overflow ([`crate::Platform::inject`]).

use std::ops::Deref;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use log::trace;

use crate::Outcome;
use crate::mask::{first, members};
use crate::model::Model;
use crate::source::Source;

/// Maximum number of registers on the page; the status has the slot after them.
pub const MOST_SLOTS: usize = 23;
/// Value of [`Page::passed`] that the stub writes.
pub const PASSED: u64 = u64::from_le_bytes(*b"passing!");
/// Value of [`Page::active`] while accesses may be made on the page.
pub const ACTIVE: u64 = u64::from_le_bytes(*b"on page!");
/// Value of [`Page::active`] while accesses may be made from the next freeze on, which itself needs no exit.
pub const OFFERED: u64 = u64::from_le_bytes(*b"offered!");
/// Value of [`Page::active`] after a thaw without an exit.
pub const THAWED: u64 = u64::from_le_bytes(*b"thawed!!");
/// Value of [`Page::active`] while no access may be made on the page.
pub const IDLE: u64 = u64::from_le_bytes(*b"not now!");

/// The memory that a guest's kernel shares with the VMM, for one vCPU. The stub uses the offsets of these fields.
#[repr(C)]
#[derive(Default)]
pub struct Page {
    /// [`ACTIVE`], [`OFFERED`], [`THAWED`] or [`IDLE`]; anything else before the first use.
    pub active: AtomicU64,
    /// Set to [`PASSED`] by the stub when it is about to freeze all counters by an exit.
    pub passed: AtomicU64,
    /// A bit for each slot that was written.
    pub dirty: AtomicU64,
    /// Bits written to the register that clears the status.
    pub cleared: AtomicU64,
    /// Value that thaws the counters without an exit when it is written to the control register, or 0.
    pub thaw: AtomicU64,
    /// Nonzero if a write since the freeze requires the thaw to exit.
    pub matters: AtomicU64,
    /// Value that the kernel last wrote to its APIC's LVT entry for overflows; noted before the write.
    pub entry: AtomicU64,
    /// Value last written to each register.
    pub written: [AtomicU64; MOST_SLOTS + 1],
    /// Value that a read of each register returns; the last slot is the status.
    pub shown: [AtomicU64; MOST_SLOTS + 1],
    /// First and last value that can be written to each register without a thaw that exits.
    pub free: [[AtomicU64; 2]; MOST_SLOTS],
    /// [`IDLE`] since the first use. Anything else means that another kernel uses the memory.
    pub end: AtomicU64,
}

impl Page {
    /// Distance of two vCPUs' pages: a whole number of cache lines, and a power of two.
    pub const STRIDE: usize = 1024;
}

const _: () = assert!(size_of::<Page>() <= Page::STRIDE);

/// A register that can be accessed on the page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// The register's number.
    pub register: u32,
    /// Bits that can be written without a fault and without an immediate effect.
    pub accepts: u64,
    /// Bits that a read returns after a write.
    pub keeps: u64,
    /// The counter whose value the register is, if it is a counter's.
    pub counter: Option<usize>,
}

/// Counters by their RDPMC numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counters {
    /// RDPMC number of the first counter.
    pub first: u32,
    /// Number of counters.
    pub count: u32,
    /// Slot of the first counter.
    pub slot: u32,
    /// Distance from one counter's slot to the next.
    pub stride: Stride,
}

/// Distance from one counter's slot to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stride {
    /// Counters have adjacent slots.
    One,
    /// Each counter's select has the slot before it.
    Two,
}

/// The registers of a PMU with a global control register.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Registers {
    /// Global control: a write of 0 freezes all counters.
    pub control: u32,
    /// Global status.
    pub status: u32,
    /// The register that clears bits of the status.
    pub clear: Slot,
    /// The other registers, in the order in which the VMM applies their writes; consecutive numbers have adjacent slots.
    pub slots: Vec<Slot>,
    /// Counters by their RDPMC numbers.
    pub counters: Vec<Counters>,
}

impl Registers {
    /// Returns the runs of registers with consecutive numbers: first number, first slot, length.
    pub fn runs(&self) -> Vec<(u32, u32, u32)> {
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

/// One vCPU's shared page.
pub(crate) struct SharedPage {
    memory: Box<dyn Deref<Target = Page>>,
    state: State,
}

/// What the VMM keeps of a shared page.
struct State {
    registers: Registers,
    used: Use,
    /// The page shows all registers as they are, except the status and counters that have run since.
    is_shown: bool,
    /// The hardware-changed bit of the status that the page shows. It changes even while all counters stand still.
    hardware_changed: bool,
    /// The kernel has used the page since the LVT entry was last asked for.
    is_alive: bool,
}

/// What the VMM has made the page available for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Use {
    /// Nothing.
    None,
    /// All counters are frozen; accesses are made on the page.
    Frozen,
    /// Counters are deferred; the freeze, accesses and the thaw may be made on the page.
    Offered,
}

impl SharedPage {
    /// Creates a page that is not in use yet, in this memory of the guest's.
    pub fn new(registers: Registers, memory: Box<dyn Deref<Target = Page>>) -> Self {
        let (used, is_shown, hardware_changed, is_alive) = (Use::None, false, false, false);
        Self { memory, state: State { registers, used, is_shown, hardware_changed, is_alive } }
    }

    /// Applies all writes that were made on the page. Must be called after every exit, before anything else. Returns true if
    /// all counters were updated on the way.
    pub fn apply<S: Source>(&mut self, model: &mut dyn Model<S>) -> bool {
        self.state.apply(&self.memory, model)
    }

    /// Returns the APIC's LVT entry for overflows as the kernel has noted it. Returns `None` unless the kernel has used the page
    /// since the last call, which shows that it is still the kernel with the stub.
    pub fn lvt_entry(&mut self) -> Option<&AtomicU64> {
        std::mem::take(&mut self.state.is_alive).then_some(&self.memory.entry)
    }

    /// Withdraws the page until the next freeze, because the guest accesses a register in the ordinary way: to thaw the counters,
    /// or because its kernel does not know of the page.
    pub fn withdraw(&mut self) {
        self.state.withdraw(&self.memory);
    }

    /// Makes the page available before an entry, if the stub has announced a freeze, all counters are frozen, and `is_its_own`
    /// says that the guest uses this page.
    pub fn activate<S: Source>(&mut self, model: &mut dyn Model<S>, is_its_own: impl FnOnce() -> bool) {
        self.state.activate(&self.memory, model, is_its_own);
    }

    /// Makes the page available after an alarm, if the guest handles the overflow's interrupt at the next entry.
    pub fn offer<S: Source>(&mut self, model: &mut dyn Model<S>) {
        self.state.offer(&self.memory, model);
    }
}

impl State {
    fn apply<S: Source>(&mut self, page: &Page, model: &mut dyn Model<S>) -> bool {
        // Nobody else writes while the vCPU does not run, unless the guest's other vCPUs do what they should not.
        let active = page.active.load(Relaxed);
        let (was_offered, is_in_use) = match self.used {
            Use::None => return false,
            Use::Frozen => (false, active == ACTIVE),
            Use::Offered => (true, [OFFERED, ACTIVE, THAWED].contains(&active)),
        };
        if is_in_use && active != OFFERED {
            self.is_alive = true;
            self.apply_writes(page, model);
        }
        if was_offered {
            model.unit().commit();
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

    fn withdraw(&mut self, page: &Page) {
        if self.used != Use::None {
            self.end(page);
        }
        self.is_shown = false;
    }

    fn activate<S: Source>(
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

    fn offer<S: Source>(&mut self, page: &Page, model: &mut dyn Model<S>) {
        let is_its_own = [&page.active, &page.end].map(|end| end.load(Relaxed)) == [IDLE; 2];
        if self.used != Use::None || !is_its_own {
            return;
        }
        let Outcome::Value(control) = model.read(self.registers.control) else { return };
        if !model.unit().defer() {
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
        // A counter that stands still has the value that the page shows.
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

    /// Applies the register writes noted on the page.
    fn apply_writes<S: Source>(&self, page: &Page, model: &mut dyn Model<S>) {
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
