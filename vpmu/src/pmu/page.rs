//! The VMM's side of a shared page: when the page is available to the guest's kernel, and what the kernel's accesses on
//! it mean for the registers. See [`crate::shared_page`].

use std::ops::Deref;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use log::trace;

use crate::bank::Handled;
use crate::mask::{first, members};
use crate::model::Model;
use crate::outcome::Outcome;
use crate::shared_page::{ACTIVE, FREEZING, IDLE, OFFERED, Page, Registers, THAWED};
use crate::source::Source;

/// One vCPU's shared page.
pub struct SharedPage {
    memory: Box<dyn Deref<Target = Page>>,
    state: State,
}

/// What the VMM keeps of a shared page.
struct State {
    registers: Registers,
    used: Use,
    /// The page shows all registers as they are, except the status and counters that have run since.
    is_shown: bool,
    /// Counters that have run since the page was last written, as far as [`SharedPage::note_running`] was told.
    have_run: u64,
    /// The hardware-changed bit of the status that the page shows. It changes even while all counters stand still.
    hardware_changed: bool,
    /// The kernel has used the page since [`SharedPage::lvt_entry`] was last called.
    used_since_lvt_read: bool,
}

/// What the VMM has made the page available for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Use {
    /// Nothing.
    None,
    /// All counters are frozen; accesses are made on the page.
    Frozen,
    /// Counters are deferred; the freeze, accesses and the thaw may be made on the page.
    InHandler,
}

impl SharedPage {
    /// Creates a page that is not in use yet, in this memory of the guest's.
    pub fn new(registers: Registers, memory: Box<dyn Deref<Target = Page>>) -> Self {
        let state = State {
            registers,
            used: Use::None,
            is_shown: false,
            have_run: 0,
            hardware_changed: false,
            used_since_lvt_read: false,
        };
        Self { memory, state }
    }

    /// Records which counters have run until this exit. Must be called at every exit, before anything else.
    pub fn note_running(&mut self, counters: u64) {
        self.state.have_run |= counters;
    }

    /// Applies all writes that were made on the page. Must be called after every exit, before anything else. Returns
    /// true if all counters were updated on the way.
    pub fn apply<S: Source>(&mut self, model: &mut dyn Model<S>) -> bool {
        self.state.apply(&self.memory, model)
    }

    /// Returns the APIC's LVT entry for overflows as the kernel has noted it. Returns `None` unless the kernel has used
    /// the page since the last call, which shows that it is still the kernel with the stub.
    pub fn lvt_entry(&mut self) -> Option<&AtomicU64> {
        std::mem::take(&mut self.state.used_since_lvt_read).then_some(&self.memory.lvt_entry)
    }

    /// Withdraws the page until the next freeze, because the guest accesses a register in the ordinary way: to thaw the
    /// counters, or because its kernel does not know of the page.
    pub fn withdraw(&mut self) {
        self.state.withdraw(&self.memory);
    }

    /// Records that a register is written in the ordinary way. The page no longer shows the registers as they are,
    /// unless the write only starts or stops counters or clears the status.
    pub fn note_write(&mut self, register: u32) {
        let Registers { control, clear, .. } = &self.state.registers;
        self.state.is_shown &= register == *control || register == clear.register;
    }

    /// Records that registers have changed of which the guest knows nothing.
    pub fn forget_shown(&mut self) {
        self.state.is_shown = false;
    }

    /// Makes the page available before an entry, if the stub has announced a freeze, all counters are frozen, and
    /// `is_page_in_use` returns that the guest uses this page.
    pub fn activate_after_freeze<S: Source>(
        &mut self,
        model: &mut dyn Model<S>,
        is_page_in_use: impl FnOnce() -> bool,
    ) {
        self.state.activate_after_freeze(&self.memory, model, is_page_in_use);
    }

    /// Makes the page available after an alarm, if the guest handles the overflow's interrupt at the next entry.
    pub fn activate_in_handler<S: Source>(&mut self, model: &mut dyn Model<S>) {
        self.state.activate_in_handler(&self.memory, model);
    }
}

impl State {
    fn apply<S: Source>(&mut self, page: &Page, model: &mut dyn Model<S>) -> bool {
        // Nobody else writes while the vCPU does not run, unless the guest's other vCPUs do what they should not.
        let active = page.active.load(Relaxed);
        let (was_in_handler, is_in_use) = match self.used {
            Use::None => return false,
            Use::Frozen => (false, active == ACTIVE),
            Use::InHandler => (true, [OFFERED, ACTIVE, THAWED].contains(&active)),
        };
        if is_in_use && active != OFFERED {
            self.used_since_lvt_read = true;
            self.apply_writes(page, model);
        }
        if was_in_handler {
            model.unit().commit(match active {
                ACTIVE => Handled::Stopped,
                THAWED => Handled::Completely,
                _ => Handled::Nothing,
            });
        }
        match active {
            // Another kernel has taken over the memory.
            _ if !is_in_use => (self.used, self.is_shown) = (Use::None, false),
            ACTIVE if was_in_handler => {
                page.thaw.store(0, Relaxed);
                self.used = Use::Frozen;
                Self::write(model, self.registers.control, 0);
            }
            ACTIVE => {}
            _ => self.end(page),
        }
        was_in_handler
    }

    fn withdraw(&mut self, page: &Page) {
        if self.used != Use::None {
            self.end(page);
        }
    }

    fn activate_after_freeze<S: Source>(
        &mut self,
        page: &Page,
        model: &mut dyn Model<S>,
        is_page_in_use: impl FnOnce() -> bool,
    ) {
        match self.used {
            Use::None => {}
            Use::Frozen if self.hardware_changed != model.unit().bank.hardware().changed() => {
                return self.show(page, model);
            }
            Use::Frozen | Use::InHandler => return,
        }
        if page.freezing.load(Relaxed) != FREEZING {
            return;
        }
        page.freezing.store(0, Relaxed);
        if model.unit().control() != 0 {
            return;
        }
        if is_page_in_use() {
            self.is_shown &= Self::is_as_left(page);
            self.begin(page, model, Use::Frozen);
        }
    }

    fn activate_in_handler<S: Source>(&mut self, page: &Page, model: &mut dyn Model<S>) {
        if self.used != Use::None || !Self::is_as_left(page) {
            return;
        }
        let Outcome::Value(control) = model.read(self.registers.control) else { return };
        if !model.unit().defer() {
            return;
        }
        self.begin(page, model, Use::InHandler);
        page.thaw_must_exit.store(0, Relaxed);
        page.thaw.store(control, Relaxed);
    }

    /// Returns whether both ends of the page are as they were left: no other kernel uses the memory.
    fn is_as_left(page: &Page) -> bool {
        [&page.active, &page.tail_guard].map(|end| end.load(Relaxed)) == [IDLE; 2]
    }

    fn begin<S: Source>(&mut self, page: &Page, model: &mut dyn Model<S>, used: Use) {
        page.dirty.store(0, Relaxed);
        page.cleared.store(0, Relaxed);
        page.thaw.store(0, Relaxed);
        self.show(page, model);
        self.used = used;
        page.active.store(if used == Use::InHandler { OFFERED } else { ACTIVE }, Relaxed);
    }

    fn end(&mut self, page: &Page) {
        self.used = Use::None;
        page.active.store(IDLE, Relaxed);
        page.tail_guard.store(IDLE, Relaxed);
    }

    fn show<S: Source>(&mut self, page: &Page, model: &mut dyn Model<S>) {
        let (unit, is_shown) = (model.unit(), std::mem::replace(&mut self.is_shown, true));
        self.hardware_changed = unit.bank.hardware().changed();
        let slots = || self.registers.slots.iter().zip(page.shown.iter().zip(&page.no_exit_range));
        // A counter that stands still has the value that the page shows.
        let have_run = std::mem::take(&mut self.have_run) | unit.running();
        let changed = if is_shown { have_run } else { unit.all() };
        for (slot, (shown, range)) in slots() {
            if let Some(counter) = slot.counter.filter(|counter| changed & 1 << counter != 0) {
                shown.store(unit.bank.value(counter), Relaxed);
                if let Some(values) = unit.bank.no_exit_values(counter) {
                    range[0].store(*values.start(), Relaxed);
                    range[1].store(*values.end(), Relaxed);
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
            for (slot, (shown, range)) in slots().filter(|(slot, _)| slot.counter.is_none()) {
                let value = read(slot.register, shown);
                for end in range {
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
                    model.unit().write(counter, written & slot.write_mask);
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
