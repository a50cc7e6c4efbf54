//! Event-based branches ([`crate::ebb`]): each counter with the flag has a companion in the bank, which counts the same
//! and overflows when the program wants to be branched.
//!
//! A companion runs while its counter runs, from the exit at which a thread with a slot for it is found. When the
//! counter stops, which the kernel does before it switches to another task, the counts that are left go to the thread's
//! slot.

use std::num::NonZeroU64;
use std::time::Duration;

use super::Unit;
use crate::ebb::{Owner, Slot, Thread};
use crate::event::{Event, Selection};
use crate::journal::Entry;
use crate::mask::{self, members};
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
    /// The thread for which they were started.
    owner: Option<Owner>,
    /// Time at which the rate limiter permits the branch that it has denied.
    throttled_until: Option<Duration>,
    /// The state was restored: the thread may be waiting for a branch.
    is_restored: bool,
}

impl Branches {
    /// Returns whether something is to be done before the guest is entered again.
    fn has_work(&mut self, running: u64, now: impl FnOnce() -> Duration) -> bool {
        self.unwanted &= running;
        (self.overflowed | self.to_start(running) | self.stopped(running)) != 0
            || self.is_restored
            || self.throttled_until.is_some_and(|until| now() >= until)
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

    /// Time at which the rate limiter permits the branch that it has denied.
    pub fn throttled_until(&self) -> Option<Duration> {
        self.throttled_until
    }

    /// Records overflows of companions.
    pub fn overflow(&mut self, counters: u64) {
        self.overflowed |= counters;
    }
}

impl<S: Source> Unit<S> {
    /// Sets whether a counter has the flag, and what its companion counts.
    #[inline]
    pub(super) fn flag(&mut self, counter: usize, event: Option<NonZeroU64>, selection: Option<Selection>) {
        if event.is_some() || self.branches.flagged & 1 << counter != 0 {
            self.set_flag(counter, event, selection);
        }
    }

    #[cold]
    fn set_flag(&mut self, counter: usize, event: Option<NonZeroU64>, selection: Option<Selection>) {
        let bit = 1 << counter;
        let is_countable =
            |selection: &Selection| !matches!(selection.event, Event::Denied { .. } | Event::Absent { .. });
        let event = event.filter(|_| selection.as_ref().is_some_and(is_countable));
        let Branches { flagged, started, unwanted, overflowed, trying, .. } = &mut self.branches;
        if event != self.configs[counter].branches {
            for set in [started, unwanted, overflowed, trying] {
                *set &= !bit;
            }
        }
        *flagged = *flagged & !bit | u64::from(event.is_some()) << counter;
        let selection = selection.filter(|_| event.is_some());
        self.bank.configure_companion(self.companion(counter), selection);
    }

    pub(super) fn companion(&self, counter: usize) -> usize {
        self.configs.len() + counter
    }

    /// Returns whether the thread that runs has to be looked at before the guest is entered again.
    #[inline]
    pub fn has_branch_work(&mut self) -> bool {
        self.branches.flagged != 0 && {
            let running = self.running();
            self.branches.has_work(running, || self.bank.now())
        }
    }

    /// Returns whether companions run.
    pub fn branches_soon(&self) -> bool {
        self.branches.are_started()
    }

    /// Serves the companions of counters that have overflowed, stopped or started since the last call, for the thread
    /// that the vCPU runs. Returns the handler at which the thread has to go on.
    pub fn serve_branches(&mut self, thread: Option<&Thread>) -> Option<u64> {
        let running = self.running();
        (self.branches.throttled_until, self.branches.is_restored) = (None, false);
        let Some(thread) = thread else {
            self.forget(self.branches.flagged & running);
            return None;
        };
        // An event that is not attached to a task is not stopped between two threads.
        if self.branches.owner.is_some_and(|owner| owner != thread.owner) {
            self.forget(0);
        }
        self.branches.owner = Some(thread.owner);
        let stopped = self.branches.stopped(running);
        // An overflow that comes too soon for the policy has not been reported.
        let delayed = mask::of(members(stopped).filter(|counter| self.has_overflowed(*counter)));
        let overflowed = (std::mem::take(&mut self.branches.overflowed) | delayed) & self.branches.started;
        let counted =
            mask::of(members(overflowed).filter(|counter| self.overflow_companion(*counter, thread)));
        for counter in members(stopped & self.branches.started) {
            self.stop_companion(counter, thread);
        }
        for counter in members(self.branches.to_start(running)) {
            self.start_companion(counter, thread);
        }
        let handler = self.branch(thread);
        if counted != 0 || handler.is_some() {
            self.bank.journal().add(|| Entry::Branched { counters: counted, handler });
        }
        handler
    }

    /// Branches to the thread's handler, if that is due, enabled, and possible now. Returns the handler.
    fn branch(&mut self, thread: &Thread) -> Option<u64> {
        let handler = thread.due()?;
        // The kernel's own interrupt is for the instruction at which the program is.
        let Some(from) = thread.instruction.filter(|_| !self.is_interrupt_pending()) else {
            self.try_again();
            return None;
        };
        if let Some(limiter) = &mut self.rate_limiter
            && let Err(until) = limiter.take(self.bank.now())
        {
            self.branches.throttled_until = Some(until);
            self.withheld += 1;
            return None;
        }
        thread.branch(from);
        Some(handler)
    }

    /// Ends all branches until their counters start anew; those of `unwanted` even if they run now.
    fn forget(&mut self, unwanted: u64) {
        let Branches { started, overflowed, trying, owner, .. } = &mut self.branches;
        (*started, *overflowed, *trying, *owner) = (0, 0, 0, None);
        self.branches.unwanted = unwanted;
        self.run();
    }

    fn slot_of<'a>(&self, counter: usize, thread: &Thread<'a>) -> Option<Slot<'a>> {
        thread.slot(self.configs[counter].branches?.get())
    }

    fn has_overflowed(&self, counter: usize) -> bool {
        self.bank.reloads(self.companion(counter)) != 0
    }

    /// Returns whether the program wanted to be branched: the companion may also have overflowed for another try.
    fn overflow_companion(&mut self, counter: usize, thread: &Thread) -> bool {
        let (companion, bit) = (self.companion(counter), 1 << counter);
        let Some(again) = self.bank.take_reloads(companion).checked_sub(1) else { return false };
        let reload = self.bank.period(companion);
        let since =
            again.saturating_mul(reload).saturating_add(reload.saturating_sub(self.bank.left(companion)));
        let ahead = if self.branches.trying & bit == 0 { 0 } else { reload };
        self.branches.trying &= !bit;
        let Some(slot) = self.slot_of(counter, thread) else {
            self.end_companion(counter);
            return false;
        };
        let period = slot.period();
        let (overflows, left) = overflows(since, ahead, period);
        slot.note(left, overflows);
        if overflows != 0 {
            thread.occurs();
        }
        if period == 0 || thread.is_stuck() {
            self.end_companion(counter);
        } else {
            self.bank.reload(companion, left, period);
        }
        overflows != 0
    }

    fn stop_companion(&mut self, counter: usize, thread: &Thread) {
        let companion = self.companion(counter);
        let behind = if self.branches.trying & 1 << counter != 0 { self.bank.period(companion) } else { 0 };
        let left = self.bank.left(companion).saturating_add(behind);
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
            // Those of other host events were not updated at this exit.
            self.bank.read(companion);
            let left = self.bank.left(companion);
            if left > 1 && !self.has_overflowed(counter) {
                self.bank.reload(companion, 1, left - 1);
                self.branches.trying |= 1 << counter;
            }
        }
        self.take_overflows();
    }

    /// Returns the state of the branches, for [`Self::resume_branches`].
    pub(super) fn save_branches(&self) -> Vec<BranchState> {
        let state = |counter| {
            let companion = self.companion(counter);
            BranchState {
                counter,
                left: self.bank.left(companion),
                period: self.bank.period(companion),
                overflows: self.bank.reloads(companion),
                trying: self.branches.trying & 1 << counter != 0,
            }
        };
        members(self.branches.started).map(state).collect()
    }

    /// Continues branches where they were saved. The thread that runs is found again at the next exit.
    pub(super) fn resume_branches(&mut self, states: &[BranchState]) {
        let flagged = self.branches.flagged;
        self.branches = Branches { flagged, is_restored: true, ..Branches::default() };
        for state in states.iter().filter(|state| flagged & 1 << state.counter != 0) {
            let (companion, bit) = (self.companion(state.counter), 1 << state.counter);
            self.bank.reload(companion, state.left, state.period);
            self.bank.set_reloads(companion, state.overflows);
            self.branches.started |= bit;
            self.branches.trying |= if state.trying { bit } else { 0 };
            self.branches.overflowed |= if state.overflows != 0 { bit } else { 0 };
        }
    }
}

/// Returns how often a program wanted to be branched, and how many counts are left until it wants to be again: `since`
/// counts after its companion overflowed, when there were `ahead` counts left.
fn overflows(since: u64, ahead: u64, period: u64) -> (u64, u64) {
    match since.checked_sub(ahead) {
        None => (0, ahead - since),
        Some(_) if period == 0 => (1, 1),
        Some(since) => ((since / period).saturating_add(1), period - since % period),
    }
}
