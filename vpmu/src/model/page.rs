//! The VMM's side of a page of the guest's memory on which the guest's kernel does without exits what only concerns
//! counters that stand still: accesses to registers on x86 ([`crate::shared_page`]), calls of the SBI on RISC-V
//! ([`crate::sbi_page`]).

use super::Model;
use crate::outcome::Injected;
use crate::shared_page::LvtNote;
use crate::source::Source;
use crate::unit::Unit;

/// One vCPU's page.
pub(crate) trait GuestPage<S: Source> {
    /// Applies what the kernel did on the page. Must be called after every exit, before anything else. Returns true if
    /// all counters were updated on the way.
    fn apply(&mut self, model: &mut dyn Model<S>) -> bool;

    /// Applies what the kernel did on the page, and withdraws the page: the guest makes an ordinary access, or the VMM
    /// reads or changes registers itself.
    fn withdraw(&mut self, model: &mut dyn Model<S>) {
        self.apply(model);
    }

    /// Records that a register is written in the ordinary way, with an exit.
    fn note_write(&mut self, _register: u32, _value: u64) {}

    /// Records an ordinary call of this function of the SBI's, with this last argument.
    fn note_call(&mut self, _function: u64, _last_argument: u64) {}

    /// Records that registers have changed of which the guest knows nothing.
    fn forget_shown(&mut self);

    /// Prepares [`Self::activate`] after an exit, before the pending interrupt is taken.
    fn prepare(&mut self, _unit: &mut Unit<S>) {}

    /// Returns what is kept of the APIC's LVT entry for overflows. Returns `None` if the kernel has not used the page
    /// yet, or if the memory is no longer a page.
    fn lvt_note(&mut self) -> Option<LvtNote<'_>> {
        None
    }

    /// Makes the page available for the next entry, if the exit permits that. `alarm` says how the guest takes the
    /// interrupt of an alarm, if there is one. `is_in_use` returns whether the guest uses this page, as far as its
    /// registers say that.
    fn activate(
        &mut self,
        model: &mut dyn Model<S>,
        alarm: Option<Injected>,
        is_in_use: &mut dyn FnMut() -> bool,
    );
}
