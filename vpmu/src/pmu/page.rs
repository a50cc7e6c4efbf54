//! x86's shared page: when the page is available to the guest's kernel, and what the kernel's accesses on
//! it mean for the registers. See [`crate::shared_page`].

use std::ops::Deref;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use log::trace;

use crate::bank::Handled;
use crate::mask::{first, members};
use crate::model::Model;
use crate::model::page::GuestPage;
use crate::outcome::{Injected, Outcome};
use crate::shared_page::{ACTIVE, FREEZING, IDLE, LvtNote, OFFERED, Page, Registers, THAWED};
use crate::source::Source;

/// One vCPU's shared page.
pub struct SharedPage {
    memory: Box<dyn Deref<Target = Page>>,
    state: State,
}

/// What the VMM keeps of a shared page.
struct State {
    registers: Registers,
    /// The slot of each counter, by its number.
    slots_of_counters: Vec<Option<usize>>,
    used: Use,
    /// The page shows all registers as they are, except the status and counters that have run since.
    is_shown: bool,
    /// Counters that have run since the page was last written, as of the last exit.
    have_run: u64,
    /// The hardware-changed bit of the status that the page shows. It changes even while all counters stand still.
    hardware_changed: bool,
    /// The kernel has used the page since [`GuestPage::lvt_note`] was last called.
    used_since_lvt_note: bool,
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
        let counters = registers.slots.iter().filter_map(|slot| slot.counter);
        let slot_of = |counter| registers.slots.iter().position(|slot| slot.counter == Some(counter));
        let slots_of_counters = (0..counters.max().map_or(0, |last| last + 1)).map(slot_of).collect();
        let state = State {
            registers,
            slots_of_counters,
            used: Use::None,
            is_shown: false,
            have_run: 0,
            hardware_changed: false,
            used_since_lvt_note: false,
        };
        Self { memory, state }
    }
}

impl<S: Source> GuestPage<S> for SharedPage {
    fn apply(&mut self, model: &mut dyn Model<S>) -> bool {
        self.state.have_run |= model.unit().running();
        self.state.used != Use::None && self.state.apply(&self.memory, model)
    }

    fn withdraw(&mut self, model: &mut dyn Model<S>) {
        self.apply(model);
        if self.state.used != Use::None {
            self.state.end(&self.memory);
        }
    }

    /// The page no longer shows the registers as they are, unless the write only starts or stops counters or clears the
    /// status.
    fn note_write(&mut self, register: u32, value: u64) {
        let Registers { control, clear, .. } = &self.state.registers;
        self.state.is_shown &= register == *control || register == clear.register;
        // The stub announces a freeze that exits. Whoever does not is another kernel, and opens its entry elsewhere.
        let is_freeze = register == *control && value == 0;
        if is_freeze && self.memory.freezing.load(Relaxed) != FREEZING && State::is_as_left(&self.memory) {
            self.memory.lvt_mask.store(0, Relaxed);
        }
    }

    fn forget_shown(&mut self) {
        self.state.is_shown = false;
    }

    fn lvt_note(&mut self) -> Option<LvtNote<'_>> {
        let is_used = std::mem::take(&mut self.state.used_since_lvt_note);
        (is_used || State::is_as_left(&self.memory)).then(|| LvtNote::new(&self.memory, is_used))
    }

    /// Makes the page available if the guest handles an alarm's interrupt at this entry; or if the stub has announced a
    /// freeze, and all counters are frozen.
    fn activate(
        &mut self,
        model: &mut dyn Model<S>,
        alarm: Option<Injected>,
        is_in_use: &mut dyn FnMut() -> bool,
    ) {
        if alarm == Some(Injected::AtNextEntry) {
            self.state.activate_in_handler(&self.memory, model);
        }
        if self.state.used == Use::Frozen || self.memory.freezing.load(Relaxed) == FREEZING {
            self.state.activate_after_freeze(&self.memory, model, is_in_use);
        }
    }
}

impl State {
    /// Applies what was made on a page that is available. Like the next two, it is no part of its caller, so that
    /// an exit at which there is nothing to do saves no registers for it.
    #[inline(never)]
    fn apply<S: Source>(&mut self, page: &Page, model: &mut dyn Model<S>) -> bool {
        // Nobody else writes while the vCPU does not run, unless the guest's other vCPUs do what they should not.
        let active = page.active.load(Relaxed);
        let was_in_handler = self.used == Use::InHandler;
        let is_in_use = active == ACTIVE || was_in_handler && [OFFERED, THAWED].contains(&active);
        if is_in_use && active != OFFERED {
            self.used_since_lvt_note = true;
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

    /// Makes the page available if the stub has announced a freeze, or shows there what has changed since.
    #[inline(never)]
    fn activate_after_freeze<S: Source>(
        &mut self,
        page: &Page,
        model: &mut dyn Model<S>,
        is_in_use: &mut dyn FnMut() -> bool,
    ) {
        match self.used {
            Use::None => {}
            Use::Frozen if self.hardware_changed != model.unit().bank.hardware().changed() => {
                return self.show(page, model);
            }
            Use::Frozen | Use::InHandler => return,
        }
        page.freezing.store(0, Relaxed);
        if model.unit().control() != 0 {
            return;
        }
        if is_in_use() {
            self.is_shown &= Self::is_as_left(page);
            self.begin(page, model, Use::Frozen);
        }
    }

    #[inline(never)]
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
        // A counter that stands still has the value that the page shows.
        let have_run = std::mem::take(&mut self.have_run) | unit.running();
        let changed = if is_shown { have_run } else { unit.all() };
        for counter in members(changed & first(self.slots_of_counters.len())) {
            let Some(slot) = self.slots_of_counters[counter] else { continue };
            page.shown[slot].store(unit.bank.value(counter), Relaxed);
            if let Some(values) = unit.bank.no_exit_values(counter) {
                page.no_exit_range[slot][0].store(*values.start(), Relaxed);
                page.no_exit_range[slot][1].store(*values.end(), Relaxed);
            }
        }
        let mut read = |register, shown: &AtomicU64| {
            let Outcome::Value(value) = model.read(register) else { return 0 };
            shown.store(value, Relaxed);
            value
        };
        read(self.registers.status, &page.shown[self.registers.slots.len()]);
        if !is_shown {
            let slots = self.registers.slots.iter().zip(page.shown.iter().zip(&page.no_exit_range));
            for (slot, (shown, range)) in slots.filter(|(slot, _)| slot.counter.is_none()) {
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
