//! RISC-V's shared page: what the guest's kernel finds there at an entry, and what its calls there mean for the
//! counters. See [`crate::sbi_page`].

use std::sync::atomic::Ordering::Relaxed;

use log::trace;

use super::{Riscv, Use, sbi};
use crate::bank::Handled;
use crate::bank::exit_mark::Marked;
use crate::mask::{self, members};
use crate::model::Model;
use crate::model::page::GuestPage;
use crate::outcome::Injected;
use crate::sbi_page::{ACTIVE, COUNTERS, IDLE, NO_CONFIGURATION, NO_TRAP, OVERFLOW, Page, Shared};
use crate::source::Source;
use crate::unit::Unit;

/// One vCPU's shared page.
pub struct SharedPage {
    shared: Shared,
    /// The guest's kernel uses the page: it has announced that in a call.
    is_in_use: bool,
    /// The function of the call that is being handled, if it is such a call.
    announced: Option<u64>,
    /// Counters whose changes can be made as of this exit, if the page is going to be made available.
    marked: Option<Marked>,
    /// Counters that were used when the page was last shown, or since.
    last_used: u64,
    /// What the page shows; `None` while it is not available.
    shown: Option<State>,
    /// The page shows the configurations as they are.
    shows_configurations: bool,
}

impl SharedPage {
    /// Creates a page that is not in use yet.
    pub fn new(shared: Shared) -> Self {
        let (is_in_use, announced, marked, shown, shows_configurations) = (false, None, None, None, false);
        Self { shared, is_in_use, announced, marked, last_used: 0, shown, shows_configurations }
    }

    /// Returns whether both ends of the page are as they were left, and `active` has this value.
    fn is_as_left(&self, active: u64) -> bool {
        let memory = &self.shared.memory;
        [&memory.active, &memory.tail_guard].map(|end| end.load(Relaxed)) == [active, IDLE]
    }
}

/// What the counters are: masks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct State {
    running: u64,
    used: u64,
    overflows: u64,
}

/// A configuration that can be repeated on the page: flags, event index and event data.
pub type Configuration = [u64; 3];

impl<S: Source> Riscv<S> {
    fn state(&self) -> State {
        let all = self.shape.programmable();
        State {
            running: self.unit.control() & all,
            used: self.used() & all,
            overflows: self.unit.known_status() & self.shape.interrupting(),
        }
    }

    /// Remembers a counter's configuration, so that it can be repeated on the page.
    pub(super) fn remember(&mut self, counter: usize, configuration: Option<Configuration>) {
        let before = std::mem::replace(&mut self.configurations[counter], configuration);
        self.has_new_configurations |= before != configuration;
    }

    fn use_of(&mut self, [flags, index, data]: Configuration) -> Option<Use> {
        let event = self.countable(index, data)?;
        Some(Use { event, filter: sbi::Config(flags).filter() })
    }

    /// Makes what was made of the counters on the page as of this exit. Returns the counters that are used now. It is
    /// no part of its caller, so that an exit at which there is nothing to do saves no registers for it.
    #[inline(never)]
    fn adopt(&mut self, shown: State, memory: &Page) -> u64 {
        let all = self.shape.programmable();
        let known = |counter: &usize| self.configurations[*counter].is_some();
        let used = memory.used.load(Relaxed) & all;
        let used = used & (shown.used | mask::of(members(used).filter(known)));
        let running = memory.running.load(Relaxed) & used;
        let written = memory.written.load(Relaxed) & all;
        let overflows = memory.overflows.load(Relaxed);
        let values: Vec<_> =
            members(written).map(|counter| (counter, memory.values[counter].load(Relaxed))).collect();
        trace!("calls without an exit: {shown:x?} became {running:#x} running, {used:#x} used, {values:x?}");
        self.unit.bank.rewind();
        let control = self.unit.control();
        let changed = (running ^ shown.running) | (used ^ shown.used) | written;
        self.unit.set_control(control & !changed);
        self.unit.clear_status(shown.overflows & !overflows);
        for counter in members(shown.used & !used) {
            self.uses[counter] = None;
        }
        for counter in members(used & !shown.used) {
            if let Some(wanted) = self.configurations[counter].and_then(|known| self.use_of(known)) {
                self.configure(counter, wanted);
            }
        }
        for (counter, value) in values {
            self.unit.write(counter, value);
        }
        let running = running & self.used();
        self.unit.set_control(control & !all | running);
        self.unit.commit(Handled::Completely);
        used
    }
}

impl<S: Source> GuestPage<S> for SharedPage {
    fn apply(&mut self, model: &mut dyn Model<S>) -> bool {
        let Some(shown) = self.shown.take() else { return false };
        let Some(model) = model.riscv() else { return false };
        // Nobody else writes while the vCPU does not run, unless the guest's other vCPUs do what they should not.
        let is_ours = self.is_as_left(ACTIVE);
        // Otherwise another kernel has taken over the memory.
        self.is_in_use &= is_ours;
        let memory = &*self.shared.memory;
        if is_ours {
            memory.active.store(IDLE, Relaxed);
        }
        if !is_ours || memory.changed.load(Relaxed) == 0 {
            model.unit.bank.forget_marks();
            return false;
        }
        self.last_used |= model.adopt(shown, memory);
        true
    }

    fn note_call(&mut self, function: u64, last_argument: u64) {
        let is_announced = last_argument == Page::announcement(self.shared.number);
        self.announced = is_announced.then_some(function);
        self.is_in_use |= is_announced;
    }

    fn forget_shown(&mut self) {
        (self.last_used, self.shows_configurations) = (u64::MAX, false);
    }

    /// Marks the counts of this exit, if the page is going to be made available.
    fn prepare(&mut self, unit: &mut Unit<S>) {
        let is_wanted = self.announced.is_some() || self.is_in_use && unit.is_interrupt_pending();
        let with_time = matches!(self.announced, Some(sbi::START | sbi::STOP));
        self.marked = is_wanted.then(|| unit.mark_exit(with_time));
    }

    /// Makes the page available after a call, or after an alarm whose interrupt was injected.
    fn activate(
        &mut self,
        model: &mut dyn Model<S>,
        alarm: Option<Injected>,
        _is_in_use: &mut dyn FnMut() -> bool,
    ) {
        let Some(model) = model.riscv() else { return };
        let (marked, announced) = (self.marked.take(), self.announced.take());
        let cause = match (announced, alarm) {
            (Some(_), _) => NO_TRAP,
            (None, Some(_)) => OVERFLOW,
            (None, None) => return model.unit.bank.forget_marks(),
        };
        let Some(marked) = marked else { return };
        let is_ours = self.is_as_left(IDLE);
        if cause == OVERFLOW && !is_ours {
            self.is_in_use = false;
            return model.unit.bank.forget_marks();
        }
        let memory = &*self.shared.memory;
        let (state, all) = (model.state(), model.shape.programmable());
        // The value of a counter that is not used stays the same.
        let changing = if is_ours { (state.used | self.last_used) & all } else { all };
        self.last_used = state.used;
        for counter in members(changing) {
            memory.values[counter].store(model.unit.bank.value(counter), Relaxed);
        }
        // A kernel that starts one counter after the other starts those of time with the one before, and the same for
        // stops.
        let marked_for =
            |function| marked.programs | if announced == Some(function) { marked.time } else { 0 };
        let mut may_start = 0;
        for counter in members(marked_for(sbi::START) & all) {
            if let Some(values) = model.unit.bank.start_values(counter) {
                may_start |= 1 << counter;
                for (word, value) in memory.no_exit_values[counter].iter().zip(values) {
                    word.store(value, Relaxed);
                }
            }
        }
        self.shows_configurations &= !std::mem::take(&mut model.has_new_configurations) && is_ours;
        if !std::mem::replace(&mut self.shows_configurations, true) {
            for (words, known) in memory.configurations.iter().take(COUNTERS).zip(&model.configurations) {
                for (word, value) in words.iter().zip(known.unwrap_or([NO_CONFIGURATION; 3])) {
                    word.store(value, Relaxed);
                }
            }
        }
        for (word, value) in [
            (&memory.changed, 0),
            (&memory.cause, cause),
            (&memory.all, all),
            (&memory.running, state.running),
            (&memory.used, state.used),
            (&memory.may_stop, state.running & marked_for(sbi::STOP)),
            (&memory.may_start, may_start),
            (&memory.may_resume, state.running & may_start),
            (&memory.overflows, state.overflows),
            (&memory.written, 0),
            (&memory.tail_guard, IDLE),
            (&memory.active, ACTIVE),
        ] {
            word.store(value, Relaxed);
        }
        self.shown = Some(state);
    }
}
