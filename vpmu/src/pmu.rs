//! One vCPU's virtual PMU: the main type of this crate.
//!
//! A VMM does three things with it:
//! - It hands in each access to a PMU register ([`VirtualPmu::access`]; on RISC-V also [`VirtualPmu::call`]).
//! - It calls [`VirtualPmu::after_exit`] after every exit, before the guest is entered again. It handles an overflow
//!   completely: the alarm of the host's event, the counters that were due, the interrupt, the freeze, and the next
//!   alarm.
//! - It supplies a [`Platform`], which injects the overflow interrupt.

mod page;
mod wake;

#[cfg(test)]
mod tests;

use std::ops::Deref;

use log::trace;

use crate::ebb::Thread;
use crate::journal::Entry;
use crate::model::Model;
use crate::model::amd::{self, Amd};
use crate::model::intel::{self, Intel};
use crate::model::page::GuestPage;
use crate::model::riscv::{self, Answer, Riscv};
use crate::notice::Notice;
use crate::outcome::{Injected, Outcome};
use crate::policy::{OnStarvation, Policy};
use crate::report::Report;
use crate::sbi_page;
use crate::shared_page::{LvtNote, Page, Registers};
use crate::source::Source;
use crate::state::{Mismatch, PmuState};
use crate::unit::Switch;
use crate::x86::Vendor;
use page::SharedPage;
use wake::{Due, Schedule};

pub use wake::Wake;

/// A guest's access to a PMU register: an MSR on x86, a CSR on RISC-V.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Reads the register with this number. On x86 this includes RDPMC, for which KVM never exits to user space: a
    /// kernel whose RDPMCs were replaced by RDMSRs reads a counter by its RDPMC number.
    Read(u32),
    /// Reads the counter with this RDPMC number for a program, in user mode. The VMM has found out that the program may
    /// do that (x86).
    ReadInProgram(u32),
    /// Writes a value to the register with this number.
    Write(u32, u64),
}

/// Why the vCPU left the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// The guest did something: it accessed a register or a device.
    Guest,
    /// An alarm of the [`Source`] has expired.
    Alarm,
    /// The timer of [`BeforeEntry::wake`] has expired, or another thread kicked the vCPU.
    Kick,
    /// An alarm has expired and the vCPU was kicked.
    AlarmAndKick,
}

/// What the VMM supplies for [`VirtualPmu::after_exit`].
pub trait Platform {
    /// Why an interrupt cannot be injected.
    type Error;

    /// Injects the overflow interrupt into the vCPU.
    ///
    /// `lvt_note` is what the guest's kernel keeps on its shared page, if it has one, of the local APIC's LVT entry for
    /// overflows.
    fn inject(&mut self, lvt_note: Option<LvtNote<'_>>) -> Result<Injected, Self::Error>;

    /// Returns whether the guest's kernel uses the page of this vCPU. The stub puts the page's address in R9 before it
    /// exits to freeze the counters.
    fn uses_shared_page(&mut self) -> bool {
        false
    }

    /// Returns the thread that the vCPU runs, if it has a block for event-based branches (see [`crate::ebb`]).
    fn thread(&mut self) -> Option<Thread<'_>> {
        None
    }

    /// Makes the vCPU go on at an address, in user mode. Called only after [`Self::thread`] has returned where it would
    /// go on.
    fn go_on_at(&mut self, _address: u64) -> Result<(), Self::Error> {
        Ok(())
    }
}

/// What the VMM has to do before it enters the guest again.
#[derive(Debug)]
#[must_use]
pub struct BeforeEntry {
    /// How to set the timer that kicks the vCPU.
    pub wake: Wake,
    /// The policy demands that the whole machine pauses, because a counter has no hardware. See [`VirtualPmu::paused`].
    pub pause: bool,
    /// A running counter is going to interrupt the guest before long. The VMM may prepare for that.
    pub interrupts_soon: bool,
    /// The same for event-based branches: [`Platform::thread`] is going to be called.
    pub branches_soon: bool,
    /// Notices for the operator.
    pub notices: Vec<Notice>,
}

/// The virtual PMU of one vCPU.
///
/// It may be moved to another thread only if its [`Source`] may; a source of perf events may not.
pub struct VirtualPmu<S: Source> {
    model: Box<dyn Model<S>>,
    /// The registers that can be accessed on a shared page, if the PMU has a global control register.
    page_registers: Option<Registers>,
    page: Option<Box<dyn GuestPage<S>>>,
    schedule: Schedule,
    on_starvation: OnStarvation,
}

impl<S: Source + 'static> VirtualPmu<S> {
    /// Creates a PMU of AMD's, on a host whose processor is of vendor `host`, in its state after reset.
    pub fn amd(version: amd::Version, host: Vendor, source: S) -> Self {
        Self::new(Box::new(Amd::new(version, host, source)), version.page_registers())
    }

    /// Creates a PMU of Intel's, on a host whose processor is of vendor `host`, in its state after reset.
    pub fn intel(shape: intel::Shape, host: Vendor, source: S) -> Self {
        Self::new(Box::new(Intel::new(shape, host, source)), shape.page_registers())
    }

    /// Creates a PMU of RISC-V's, in its state after reset.
    ///
    /// # Panics
    /// If there are more than [`riscv::MAX_PROGRAMMABLE`] programmable counters.
    pub fn riscv(shape: riscv::Shape, source: S) -> Self {
        Self::new(Box::new(Riscv::new(shape, source)), None)
    }
}

impl<S: Source> VirtualPmu<S> {
    fn new(mut model: Box<dyn Model<S>>, page_registers: Option<Registers>) -> Self {
        let instruction_events = model.instruction_events();
        model.unit().bank.set_instruction_events(instruction_events);
        let inexact = model.inexact();
        model.unit().bank.set_inexact(inexact);
        // Where there is a status, the kernel's handler looks for the overflows of all counters.
        if page_registers.is_some() {
            model.unit().bank.gather();
        }
        Self {
            model,
            page_registers,
            page: None,
            schedule: Schedule::default(),
            on_starvation: OnStarvation::default(),
        }
    }

    /// Shares a page of the guest's memory with the guest's kernel, which accesses registers there while its counters
    /// are frozen (see [`crate::shared_page`]). Does nothing if the PMU has no global control register.
    pub fn share_page(&mut self, memory: Box<dyn Deref<Target = Page>>) {
        let page = self.page_registers.take().map(|registers| SharedPage::new(registers, memory));
        self.page = page.map(|page| Box::new(page) as _);
    }

    /// Shares a page of the guest's memory with the guest's kernel, on which it makes SBI calls (see
    /// [`crate::sbi_page`]). Does nothing for other PMUs than RISC-V's.
    pub fn share_sbi_page(&mut self, page: sbi_page::Shared) {
        if self.model.riscv().is_some() {
            self.page = Some(Box::new(riscv::SharedPage::new(page)));
        }
    }

    /// Handles a guest's access to a register. The VMM calls [`Self::after_exit`] next, as after every exit.
    pub fn access(&mut self, access: Access) -> Outcome {
        self.withdraw_page();
        if let (Some(page), Access::Write(register, value)) = (&mut self.page, access) {
            page.note_write(register, value);
        }
        match access {
            Access::Read(register) => self.read(register, false),
            Access::ReadInProgram(register) => self.read(register, true),
            Access::Write(register, value) => {
                let counted = self.complete(|| false);
                let outcome = self.model.write(register, value);
                if outcome != Outcome::Handled {
                    self.model.unit().bank.take_back(counted);
                }
                outcome
            }
        }
    }

    /// Counts an instruction of the guest that has exited and that the VMM completes, such as an access to a device.
    /// `is_user` says whether the guest is in user mode; it is called only if that makes a difference. An access to a
    /// PMU register is counted by [`Self::access`]: a read after it has read, and a write before it has an effect, so
    /// that a write which stops a counter is the last instruction that the counter counts.
    pub fn completes_instruction(&mut self, is_user: impl FnOnce() -> bool) {
        self.apply_page();
        self.complete(is_user);
    }

    fn read(&mut self, register: u32, is_user: bool) -> Outcome {
        let outcome = self.model.read(register);
        if matches!(outcome, Outcome::Value(_)) {
            self.complete(|| is_user);
        }
        outcome
    }

    fn complete(&mut self, is_user: impl FnOnce() -> bool) -> u64 {
        self.model.unit().bank.complete(is_user)
    }

    /// Handles a call of the SBI's PMU extension: the function's number, and `a0` to `a5`. `EVENT_GET_INFO` is the
    /// exception: its list is in the guest's memory, so the VMM asks for each event in it ([`Self::has_event`]).
    pub fn call(&mut self, function: u64, arguments: [u64; 6]) -> Answer {
        self.withdraw_page();
        if let Some(page) = &mut self.page {
            page.note_call(function, arguments[5]);
        }
        self.model.riscv().map_or(Answer::NOT_SUPPORTED, |model| model.call(function, arguments))
    }

    /// Returns whether an event of the SBI's, by its index and its data, can be counted.
    pub fn has_event(&mut self, index: u64, data: u64) -> bool {
        self.model.riscv().is_some_and(|model| model.has_event(index, data))
    }

    /// Handles overflows and timers, and injects the overflow interrupt if one is due. Must be called after every exit,
    /// before the guest is entered again. If injecting fails, the vCPU must not be entered again.
    pub fn after_exit<P: Platform>(
        &mut self,
        cause: Cause,
        platform: &mut P,
    ) -> Result<BeforeEntry, P::Error> {
        let is_updated = self.apply_page();
        let (is_alarm, is_kick) = match cause {
            Cause::Guest => (false, false),
            Cause::Alarm => (true, false),
            Cause::Kick => (false, true),
            Cause::AlarmAndKick => (true, true),
        };
        let unit = self.model.unit();
        if is_alarm {
            unit.alarm(is_updated);
        }
        unit.settle_completed();
        if is_kick {
            match self.schedule.take(unit.bank.now()) {
                // The alarm has updated all counters already.
                Due::Nothing if is_alarm => {}
                Due::Nothing => unit.update_all(),
                Due::Poll => unit.poll(),
                Due::PollAndRelease => {
                    unit.poll();
                    unit.bank.release_idle();
                }
            }
        }
        if unit.has_branch_work() {
            let mut thread = platform.thread();
            if let Some(thread) = thread.as_mut().filter(|_| cause == Cause::Guest) {
                // The instruction that has exited is not complete.
                thread.instruction = None;
            }
            let handler = unit.serve_branches(thread.as_ref());
            if let Some(handler) = handler {
                platform.go_on_at(handler)?;
            }
        }
        let unit = self.model.unit();
        if let Some(page) = &mut self.page {
            page.prepare(unit);
        }
        let mut injected = None;
        if unit.take_interrupt() {
            trace!("overflow interrupt: injecting");
            let lvt_note = self.page.as_mut().and_then(|page| page.lvt_note());
            injected = Some(platform.inject(lvt_note)?);
        }
        if is_alarm {
            unit.bank.alarm_delivered(injected == Some(Injected::AtNextEntry));
        }
        let wake = self.schedule.plan(unit);
        let pause = self.on_starvation == OnStarvation::Stop && unit.bank.is_starved();
        let (interrupts_soon, branches_soon) = (unit.bank.interrupts_soon(), unit.branches_soon());
        let notices = unit.bank.take_notices();
        if let Some(page) = &mut self.page {
            let alarm = injected.filter(|_| is_alarm);
            page.activate(&mut *self.model, alarm, &mut || platform.uses_shared_page());
        }
        Ok(BeforeEntry { wake, pause, interrupts_soon, branches_soon, notices })
    }

    /// Sets the policy. The registers keep their contents and the counters their values.
    pub fn set_policy(&mut self, policy: &Policy) {
        self.change_unseen();
        self.model.set_policy(policy);
        self.on_starvation = policy.on_starvation;
    }

    /// Enables or disables a counter for the guest. Returns false if there is no such counter.
    pub fn set_counter_switch(&mut self, counter: usize, to: Switch) -> bool {
        self.change_unseen();
        self.model.unit().set_counter_switch(counter, to)
    }

    /// Returns the state that the guest can see. The vCPU must not run in the guest meanwhile, and [`Self::after_exit`]
    /// has handled its last exit. The PMU can be used further.
    pub fn save(&mut self) -> PmuState {
        self.withdraw_page();
        let unit = self.model.unit().save();
        PmuState { registers: self.model.save(), unit }
    }

    /// Restores a state that another PMU of the same kind has saved; the policy is set before. Does nothing if the
    /// state cannot be one of this PMU. The guest's memory has to be restored as well: its kernel notes on the shared
    /// page whether it uses that.
    pub fn restore(&mut self, state: &PmuState) -> Result<(), Mismatch> {
        self.model.check(&state.registers)?;
        self.model.unit().check(&state.unit)?;
        self.change_unseen();
        self.model.restore(&state.registers, &state.unit);
        Ok(())
    }

    /// Reports the counters and what was done for them. Events are named in the guest's terms.
    pub fn report(&mut self) -> Report {
        self.model.report()
    }

    /// Records that the vCPU is paused: the pause does not count as starvation.
    pub fn paused(&mut self) {
        self.model.unit().bank.vm_paused();
    }

    /// Returns true if the policy no longer demands that the machine pauses.
    pub fn may_resume(&mut self) -> bool {
        self.on_starvation != OnStarvation::Stop || self.model.unit().bank.retry_scheduling()
    }

    /// Adds a notice, and takes all notices for the operator.
    pub fn add_notice(&mut self, notice: Notice) -> Vec<Notice> {
        self.model.unit().bank.add_notice(notice);
        self.model.unit().bank.take_notices()
    }

    /// Starts or stops recording journal entries, for [`Self::take_journal`].
    pub fn enable_journal(&mut self, enabled: bool) {
        self.model.unit().bank.journal().enable(enabled);
    }

    /// Takes the journal's entries since the last call, if entries are recorded.
    pub fn take_journal(&mut self) -> Vec<Entry> {
        self.model.unit().bank.journal().take()
    }

    /// Applies what the guest did on its shared page. Returns true if that also updated all counters.
    fn apply_page(&mut self) -> bool {
        self.page.as_mut().is_some_and(|page| page.apply(&mut *self.model))
    }

    /// Prepares a change of registers of which the guest knows nothing.
    fn change_unseen(&mut self) {
        self.withdraw_page();
        if let Some(page) = &mut self.page {
            page.forget_shown();
        }
    }

    /// Applies what the guest did on its shared page and withdraws the page, before an ordinary access.
    fn withdraw_page(&mut self) {
        if let Some(page) = &mut self.page {
            page.withdraw(&mut *self.model);
        }
    }
}
