//! The PMU of one vCPU, on the thread that runs it.

use kvm_ioctls::{VcpuFd, VmFd};
use log::{info, warn};
use vpmu::notice::Notice;
use vpmu::policy::Policy;
use vpmu::report::Report;
use vpmu::state::{Mismatch, PmuState};
use vpmu::{BeforeEntry, Cause, Switch, VirtualPmu, Wake};
use vpmu_perf::PerfEvents;

use super::Pmu;
use super::exit_signals::{self, ExitSignals};
use super::journal::Journal;
use super::timer::Timer;
use crate::arch::{self, Board, Emulated};
use crate::architecture::{Board as _, EmulatedPmu, Run, VcpuPmu};
use crate::kvm_error::KvmError;
use crate::memory::GuestRam;

/// A vCPU's PMU. It cannot leave its thread, because its perf events count that thread.
pub struct ThreadPmu {
    /// The PMU.
    pub pmu: VcpuPmu<Emulated>,
    exit_signals: ExitSignals,
    /// Timer for [`Wake`]. `None` if it could not be created: starved counters and delayed interrupts are then
    /// handled at the next exit.
    wake_timer: Option<Timer>,
    log: Option<Box<dyn Journal>>,
}

/// What a vCPU's PMU is created from, on the vCPU's own thread.
#[derive(Clone, Copy)]
pub struct VcpuPmuContext<'a> {
    /// Number of the vCPU.
    pub id: u8,
    /// KVM's file descriptor of the vCPU.
    pub fd: &'a VcpuFd,
    /// The PMU that the guest sees.
    pub pmu: Pmu,
    /// The operator's policy for that PMU.
    pub policy: &'a Policy,
    /// The machine's devices.
    pub board: &'a Board,
    /// The guest's memory.
    pub ram: &'a GuestRam,
}

/// What to do after an exit.
pub struct AfterExit {
    /// A timer or another thread has kicked the vCPU.
    pub kicked: bool,
    /// Notices for the operator.
    pub notices: Vec<Notice>,
    /// The machine has to pause, as the policy says for starvation.
    pub pauses: bool,
}

impl ThreadPmu {
    /// Creates the PMU of a vCPU that this thread is going to run.
    pub fn new(vcpu: &VcpuPmuContext) -> Result<Self, KvmError> {
        let pmu = match vcpu.pmu {
            Pmu::None => VcpuPmu::None,
            Pmu::Kvm => VcpuPmu::Kvm,
            Pmu::Emulated(model, host) => {
                info!("the guest's counters are backed by pinned perf events of this thread");
                let mut emulated = Emulated::new(model, host, vcpu.id, vcpu.board.pmu_link(), vcpu.ram);
                emulated.pmu().set_policy(vcpu.policy);
                VcpuPmu::Emulated(Box::new(emulated))
            }
        };
        let exit_signals = ExitSignals::unblock_in_run(vcpu.fd)?;
        let warn_no_timer =
            |error| warn!("cannot create the poll timer ({error}): starvation is reported late");
        let wake_timer = Timer::new(exit_signals::kick_signal()).map_err(warn_no_timer).ok();
        Ok(Self { pmu, exit_signals, wake_timer, log: None })
    }

    fn emulated(&mut self) -> Option<&mut VirtualPmu<PerfEvents>> {
        match &mut self.pmu {
            VcpuPmu::Emulated(emulated) => Some(emulated.pmu()),
            VcpuPmu::None | VcpuPmu::Kvm => None,
        }
    }

    /// Passes the events of the vCPU's counters to this journal from now on. Does nothing if the PMU is not emulated.
    pub fn log_into(&mut self, log: Box<dyn Journal>, fd: &mut VcpuFd) {
        if let Some(pmu) = self.emulated() {
            pmu.enable_journal(true);
            arch::Run::sync_instruction_pointer(fd);
            self.log = Some(log);
        }
    }

    /// Sets the policy.
    pub fn set_policy(&mut self, policy: &Policy) {
        if let Some(pmu) = self.emulated() {
            pmu.set_policy(policy);
        }
    }

    /// Enables or disables a counter for the guest. Returns false if there is no such counter of an emulated PMU.
    pub fn set_counter_switch(&mut self, counter: usize, to: Switch) -> bool {
        self.emulated().is_some_and(|pmu| pmu.set_counter_switch(counter, to))
    }

    /// Returns the state that the guest can see, or `None` if the PMU is not emulated.
    pub fn save(&mut self) -> Option<PmuState> {
        self.emulated().map(VirtualPmu::save)
    }

    /// Restores a state. Does nothing if the PMU is not emulated.
    pub fn restore(&mut self, state: &PmuState) -> Result<(), Mismatch> {
        self.emulated().map_or(Ok(()), |pmu| pmu.restore(state))
    }

    /// Reports the counters. Returns `None` if the PMU is not emulated.
    pub fn report(&mut self) -> Option<Report> {
        self.emulated().map(VirtualPmu::report)
    }

    /// Handles overflows and timers after an exit, and injects an interrupt if one is due. Must be called after every
    /// exit. `was_interrupted` is true if the guest itself has not caused the exit.
    pub fn after_exit(
        &mut self,
        vm: &VmFd,
        fd: &mut VcpuFd,
        was_interrupted: bool,
    ) -> Result<AfterExit, KvmError> {
        let cause = if was_interrupted { self.exit_signals.take(fd) } else { Cause::Guest };
        let kicked = matches!(cause, Cause::Kick | Cause::AlarmAndKick);
        let VcpuPmu::Emulated(emulated) = &mut self.pmu else {
            return Ok(AfterExit { kicked, notices: Vec::new(), pauses: false });
        };
        // A branch changes it.
        let instruction = self.log.is_some().then(|| arch::Run::synced_instruction_pointer(fd));
        let BeforeEntry { wake, pause: pauses, notices, .. } = emulated.after_exit(cause, vm, fd)?;
        if let Some(timer) = &mut self.wake_timer {
            match wake {
                Wake::Unchanged => {}
                Wake::Never => timer.disarm(),
                Wake::After(time) => timer.arm(time),
            }
        }
        if let (Some(log), Some(instruction)) = (&self.log, instruction) {
            let entries = emulated.pmu().take_journal();
            if !entries.is_empty() {
                log.append(instruction, &entries);
            }
        }
        Ok(AfterExit { kicked, notices, pauses })
    }

    /// Records that the vCPU is paused from now on, so that its counters miss no events until it runs again.
    pub fn paused(&mut self) {
        if let Some(pmu) = self.emulated() {
            pmu.paused();
        }
    }

    /// Adds a notice for the operator. Returns all notices that were not returned before.
    pub fn add_notice(&mut self, notice: Notice) -> Vec<Notice> {
        self.emulated().map_or_else(Vec::new, |pmu| pmu.add_notice(notice))
    }

    /// Returns true if the PMU no longer requires the machine to pause.
    pub fn may_resume(&mut self) -> bool {
        self.emulated().is_none_or(VirtualPmu::may_resume)
    }
}
