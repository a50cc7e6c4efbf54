//! Event-based branches ([`crate::ebb`]): each counter with the flag has a companion in the bank, which counts the same and
//! overflows when the program wants to be branched.
//!
//! A companion runs while its counter runs, from the exit at which a thread with a slot for it is found. When the counter stops, which
//! the kernel does before it switches to another task, the counts that are left go to the thread's slot.

use std::num::NonZeroU64;

use super::Unit;
use crate::bank::Alarm;
use crate::ebb::{Slot, Thread};
use crate::event::{Event, Selection};
use crate::journal::Entry;
use crate::mask::members;
use crate::source::Source;
use crate::state::BranchState;

/// What is known of the branches of a vCPU. Sets of counters are masks of the guest's counters.
#[derive(Debug, Default)]
pub struct Branches {
    /// Counters with the flag.
    flagged: u64,
    /// Counters whose companions run with them.
    started: u64,
    /// Counters that run without: the thread that runs does not want branches for them.
    unwanted: u64,
    /// Companions that have overflowed.
    overflowed: u64,
    /// Companions that were set to overflow at the next count, because a branch was not possible.
    trying: u64,
}

impl Branches {
    /// Returns whether something is to be done before the guest is entered again.
    fn has_work(&mut self, running: u64) -> bool {
        if self.flagged == 0 {
            return false;
        }
        self.unwanted &= running;
        (self.overflowed | self.to_start(running) | self.stopped(running)) != 0
    }

    fn to_start(&self, running: u64) -> u64 {
        self.flagged & running & !self.started & !self.unwanted
    }

    fn stopped(&self, running: u64) -> u64 {
        self.started & !running
    }

    /// Returns whether companions run.
    pub fn are_started(&self) -> bool {
        self.started != 0
    }

    /// Counters whose companions run with them.
    pub fn started(&self) -> u64 {
        self.started
    }

    /// Records overflows of companions.
    pub fn overflow(&mut self, counters: u64) {
        self.overflowed |= counters;
    }
}

impl<S: Source> Unit<S> {
    /// Sets whether a counter has the flag, and what its companion counts.
    pub(super) fn flag(&mut self, counter: usize, event: Option<NonZeroU64>, selection: Option<Selection>) {
        let bit = 1 << counter;
        let is_countable =
            |selection: &Selection| !matches!(selection.event, Event::Denied { .. } | Event::Absent { .. });
        let event = event.filter(|_| selection.as_ref().is_some_and(is_countable));
        if event.is_none() && self.branches.flagged & bit == 0 {
            return;
        }
        let Branches { flagged, started, unwanted, overflowed, trying } = &mut self.branches;
        if event != self.configs[counter].branches {
            for set in [started, unwanted, overflowed, trying] {
                *set &= !bit;
            }
        }
        *flagged = *flagged & !bit | u64::from(event.is_some()) << counter;
        let selection = selection.filter(|_| event.is_some());
        self.bank.configure(self.companion(counter), selection, Alarm::AtOverflow);
    }

    pub(super) fn companion(&self, counter: usize) -> usize {
        self.configs.len() + counter
    }

    /// Returns whether the thread that runs has to be looked at before the guest is entered again.
    pub fn has_branch_work(&mut self) -> bool {
        let running = self.running();
        self.branches.has_work(running)
    }

    /// Returns whether companions run.
    pub fn branches_soon(&self) -> bool {
        self.branches.are_started()
    }

    /// Serves the companions of counters that have overflowed, stopped or started since the last call, for the thread that the vCPU
    /// runs. Returns the handler at which the thread has to go on.
    pub fn serve_branches(&mut self, thread: Option<&Thread>) -> Option<u64> {
        let running = self.running();
        let Some(thread) = thread else {
            self.serve_nobody(running);
            return None;
        };
        let overflowed = std::mem::take(&mut self.branches.overflowed);
        for counter in members(overflowed) {
            self.overflow_companion(counter, thread);
        }
        for counter in members(self.branches.stopped(running)) {
            self.stop_companion(counter, thread);
        }
        for counter in members(self.branches.to_start(running)) {
            self.start_companion(counter, thread);
        }
        let handler = self.branch(thread);
        if overflowed != 0 {
            self.bank.journal().add(|| Entry::Branched { counters: overflowed, handler });
        }
        handler
    }

    /// Branches to the thread's handler, if that is due, enabled, and possible now. Returns the handler.
    fn branch(&mut self, thread: &Thread) -> Option<u64> {
        let handler = thread.due()?;
        let Some(from) = thread.instruction else {
            self.try_again();
            return None;
        };
        if !self.may_interrupt_now() {
            return None;
        }
        thread.branch(from);
        Some(handler)
    }

    /// The thread that runs has no block: branches for it end until its counters start anew.
    fn serve_nobody(&mut self, running: u64) {
        let Branches { flagged, started, unwanted, overflowed, trying } = &mut self.branches;
        *unwanted = *flagged & running;
        (*started, *overflowed, *trying) = (0, 0, 0);
        self.run();
    }

    fn slot_of<'a>(&self, counter: usize, thread: &Thread<'a>) -> Option<Slot<'a>> {
        thread.slot(self.configs[counter].branches?.get())
    }

    fn overflow_companion(&mut self, counter: usize, thread: &Thread) {
        let (companion, bit) = (self.companion(counter), 1 << counter);
        let reload = self.bank.period(companion);
        let again = self.bank.take_reloads(companion).saturating_sub(1);
        let since =
            again.saturating_mul(reload).saturating_add(reload.saturating_sub(self.bank.left(companion)));
        let ahead = if self.branches.trying & bit == 0 { 0 } else { reload };
        self.branches.trying &= !bit;
        let Some(slot) = self.slot_of(counter, thread) else { return self.end_companion(counter) };
        let period = slot.period();
        let (overflows, left) = overflows(since, ahead, period);
        slot.note(left, overflows);
        if overflows != 0 {
            thread.occurs();
        }
        if period == 0 || thread.is_stuck() {
            return self.end_companion(counter);
        }
        self.bank.reload(companion, left, period);
    }

    fn stop_companion(&mut self, counter: usize, thread: &Thread) {
        let left = self.counts_left(counter);
        self.branches.started &= !(1 << counter);
        self.branches.trying &= !(1 << counter);
        if let Some(slot) = self.slot_of(counter, thread) {
            slot.note(left, 0);
        }
    }

    fn start_companion(&mut self, counter: usize, thread: &Thread) {
        let slot = self.slot_of(counter, thread).map(|slot| (slot, slot.period()));
        let slot = slot.filter(|(_, period)| *period != 0);
        if let Some((slot, period)) = slot {
            let left = slot.left(period);
            self.bank.take_reloads(self.companion(counter));
            // The program sees by that that its block is served.
            slot.note(left, 0);
            self.bank.reload(self.companion(counter), left, period);
        }
        let is_wanted = slot.is_some() && !thread.is_stuck();
        *(if is_wanted { &mut self.branches.started } else { &mut self.branches.unwanted }) |= 1 << counter;
        self.run();
    }

    /// Ends branches for a counter until it starts anew.
    fn end_companion(&mut self, counter: usize) {
        self.branches.started &= !(1 << counter);
        self.branches.unwanted |= 1 << counter;
        self.run();
    }

    /// Lets the companions overflow at the next count in user mode.
    fn try_again(&mut self) {
        for counter in members(self.branches.started & self.running() & !self.branches.trying) {
            let companion = self.companion(counter);
            let left = self.bank.left(companion);
            if left > 1 {
                self.bank.reload(companion, 1, left - 1);
                self.branches.trying |= 1 << counter;
            }
        }
    }

    /// Returns how many counts are left until the program wants to be branched for a counter, as of its last update.
    fn counts_left(&self, counter: usize) -> u64 {
        let companion = self.companion(counter);
        let behind = if self.branches.trying & 1 << counter != 0 { self.bank.period(companion) } else { 0 };
        self.bank.left(companion).saturating_add(behind)
    }

    /// Returns the state of the branches, for [`Self::resume_branches`].
    pub(super) fn save_branches(&self) -> Vec<BranchState> {
        members(self.branches.started)
            .map(|counter| BranchState { counter, left: self.counts_left(counter) })
            .collect()
    }

    /// Continues branches where they were saved.
    pub(super) fn resume_branches(&mut self, states: &[BranchState]) {
        (self.branches.started, self.branches.trying, self.branches.overflowed) = (0, 0, 0);
        for state in states.iter().filter(|state| self.branches.flagged & 1 << state.counter != 0) {
            self.bank.reload(self.companion(state.counter), state.left, 1);
            self.branches.started |= 1 << state.counter;
        }
    }
}

/// Returns how often a program wanted to be branched, and how many counts are left until it wants to be again: `since` counts after its
/// companion overflowed, when there were `ahead` counts left.
fn overflows(since: u64, ahead: u64, period: u64) -> (u64, u64) {
    let period = period.max(1);
    match since.checked_sub(ahead) {
        None => (0, ahead - since),
        Some(since) => (1 + since / period, period - since % period),
    }
}
