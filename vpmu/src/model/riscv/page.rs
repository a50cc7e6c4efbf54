//! The VMM's side of the shared page: what the guest's kernel finds there at an entry, and what its calls there mean
//! for the counters. See [`crate::sbi_page`].

use std::sync::atomic::Ordering::Relaxed;

use log::trace;

use super::{Riscv, Use, sbi};
use crate::bank::Handled;
use crate::bank::exit_mark::Marked;
use crate::mask::{self, members};
use crate::sbi_page::{ACTIVE, COUNTERS, IDLE, NO_CONFIGURATION, NO_TRAP, OVERFLOW, Page, Shared};
use crate::source::Source;

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

/// What the counters are: masks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct State {
    running: u64,
    used: u64,
    overflows: u64,
}

/// A configuration that can be repeated on the page: flags, event index and event data.
pub type Configuration = [u64; 3];

impl SharedPage {
    /// Creates a page that is not in use yet.
    pub fn new(shared: Shared) -> Self {
        let (is_in_use, announced, marked, shown, shows_configurations) = (false, None, None, None, false);
        Self { shared, is_in_use, announced, marked, last_used: 0, shown, shows_configurations }
    }

    /// Notes a call of a function with this last argument.
    pub fn called(&mut self, function: u64, last_argument: u64) {
        let is_announced = last_argument == Page::announcement(self.shared.number);
        self.announced = is_announced.then_some(function);
        self.is_in_use |= is_announced;
    }

    /// Forgets which configurations the page shows.
    pub fn configurations_changed(&mut self) {
        self.shows_configurations = false;
    }
}

impl<S: Source> Riscv<S> {
    /// Returns the counters about which calls can be made on the page.
    fn on_page(&self) -> u64 {
        self.shape.programmable()
    }

    fn state(&self) -> State {
        let all = self.on_page();
        State {
            running: self.unit.control() & all,
            used: self.used() & all,
            overflows: self.unit.known_status() & self.shape.interrupting(),
        }
    }

    /// Remembers a counter's configuration, so that it can be repeated on the page.
    pub(super) fn remember(&mut self, counter: usize, configuration: Option<Configuration>) {
        let before = std::mem::replace(&mut self.configurations[counter], configuration);
        if before != configuration
            && let Some(page) = &mut self.page
        {
            page.configurations_changed();
        }
    }

    /// Applies the calls that were made on the page. Returns true if all counters were updated.
    pub(super) fn apply_calls(&mut self) -> bool {
        let Some(page) = &mut self.page else { return false };
        let Some(shown) = page.shown.take() else { return false };
        let memory = &*page.shared.memory;
        // Nobody else writes while the vCPU does not run, unless the guest's other vCPUs do what they should not.
        if [&memory.active, &memory.tail_guard].map(|end| end.load(Relaxed)) != [ACTIVE, IDLE] {
            // Another kernel has taken over the memory.
            page.is_in_use = false;
            self.unit.bank.forget_marks();
            return false;
        }
        memory.active.store(IDLE, Relaxed);
        if memory.changed.load(Relaxed) == 0 {
            self.unit.bank.forget_marks();
            return false;
        }
        let all = self.shape.programmable();
        let known = |counter: &usize| self.configurations[*counter].is_some();
        let used = memory.used.load(Relaxed) & all;
        let used = used & (shown.used | mask::of(members(used).filter(known)));
        page.last_used |= used;
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
        true
    }

    fn use_of(&mut self, [flags, index, data]: Configuration) -> Option<Use> {
        let event = self.countable(index, data)?;
        Some(Use { event, filter: sbi::Config(flags).filter() })
    }

    /// Marks the counts of this exit, if the page is going to be made available.
    pub(super) fn mark_for_page(&mut self) {
        let Some(page) = &mut self.page else { return };
        let is_wanted = page.announced.is_some() || page.is_in_use && self.unit.is_interrupt_pending();
        let with_time = matches!(page.announced, Some(sbi::START | sbi::STOP));
        page.marked = is_wanted.then(|| self.unit.mark_exit(with_time));
    }

    /// Makes the page available at the next entry, after a call or after an alarm whose interrupt was injected.
    pub(super) fn show_page(&mut self, is_interrupted: bool) {
        let (state, all) = (self.state(), self.on_page());
        let Some(page) = &mut self.page else { return };
        let marked = page.marked.take();
        let announced = page.announced.take();
        let cause = match announced {
            Some(_) => NO_TRAP,
            None if is_interrupted => OVERFLOW,
            None => return self.unit.bank.forget_marks(),
        };
        let Some(marked) = marked else { return };
        // A kernel that starts one counter after the other starts those of time with the one before, and the same for
        // stops.
        let marked_for =
            |function| marked.programs | if announced == Some(function) { marked.time } else { 0 };
        let startable = marked_for(sbi::START) & all;
        let memory = &*page.shared.memory;
        let is_ours = [&memory.active, &memory.tail_guard].map(|end| end.load(Relaxed)) == [IDLE; 2];
        if cause == OVERFLOW && !is_ours {
            page.is_in_use = false;
            return self.unit.bank.forget_marks();
        }
        page.shows_configurations &= is_ours;
        // The value of a counter that is not used stays the same.
        let changing = if is_ours { state.used | page.last_used } else { all };
        page.last_used = state.used;
        for counter in members(changing) {
            memory.values[counter].store(self.unit.bank.value(counter), Relaxed);
        }
        let mut may_start = 0;
        for counter in members(startable) {
            if let Some(values) = self.unit.bank.start_values(counter) {
                may_start |= 1 << counter;
                for (word, value) in memory.no_exit_values[counter].iter().zip(values) {
                    word.store(value, Relaxed);
                }
            }
        }
        if !std::mem::replace(&mut page.shows_configurations, true) {
            for (words, known) in memory.configurations.iter().take(COUNTERS).zip(&self.configurations) {
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
        page.shown = Some(state);
    }
}
