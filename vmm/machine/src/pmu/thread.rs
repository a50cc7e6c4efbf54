//! The PMU of one vCPU, on the thread that runs it.

use kvm_ioctls::{VcpuFd, VmFd};
use log::{info, warn};
use vpmu::notice::Notice;
use vpmu::policy::Policy;
use vpmu::{BeforeEntry, Cause, Wake};

use super::Pmu;
use super::exit_signals::{self, ExitSignals};
use super::journal::Journal;
use super::timer::Timer;
use crate::arch::{Board, Emulated, KvmRun, VcpuPmu};
use crate::kvm_error::KvmError;
use crate::memory::GuestRam;
use crate::recording::Recorder;

/// A vCPU's PMU. It cannot leave its thread, because its perf events count that thread.
pub struct ThreadPmu {
    /// The PMU.
    pub pmu: VcpuPmu,
    exit_signals: ExitSignals,
    /// Timer for [`Wake`]. `None` if it could not be created: starved counters and delayed interrupts are then
    /// handled at the next exit.
    wake_timer: Option<Timer>,
    log: Option<Box<dyn Journal>>,
    /// Samples the vCPU for the host, while somebody wants that.
    pub recorder: Option<Box<Recorder>>,
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
                let mut emulated =
                    Emulated::new(model, host, (vcpu.id, vcpu.fd), vcpu.board.pmu_link(), vcpu.ram);
                emulated.pmu.set_policy(vcpu.policy);
                VcpuPmu::Emulated(Box::new(emulated))
            }
        };
        let exit_signals = ExitSignals::unblock_in_run(vcpu.fd)?;
        let warn_no_timer =
            |error| warn!("cannot create the poll timer ({error}): starvation is reported late");
        let wake_timer = Timer::new(exit_signals::kick_signal()).map_err(warn_no_timer).ok();
        Ok(Self { pmu, exit_signals, wake_timer, log: None, recorder: None })
    }

    /// Passes the events of the vCPU's counters to this journal from now on. Does nothing if the PMU is not emulated.
    pub fn log_into(&mut self, log: Box<dyn Journal>, fd: &mut VcpuFd) {
        if let Some(pmu) = self.pmu.emulated() {
            pmu.enable_journal(true);
            KvmRun::store_instruction_pointer(fd);
            self.log = Some(log);
        }
    }

    /// Takes a sample of the vCPU for the host. One may still come when nobody wants any more.
    #[cold]
    fn sample(&mut self, fd: &mut VcpuFd) {
        if let Some(recorder) = &mut self.recorder {
            recorder.sample(fd);
        }
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
        if was_interrupted && self.exit_signals.take_sample() {
            self.sample(fd);
        }
        let after = self.before_entry(vm, fd, cause);
        // What was stored at this exit is not looked at any more.
        if self.recorder.is_some() {
            KvmRun::store_registers(fd);
        } else if self.log.is_some() {
            KvmRun::store_instruction_pointer(fd);
        }
        after
    }

    /// Handles overflows and timers, and injects an interrupt if one is due.
    fn before_entry(&mut self, vm: &VmFd, fd: &mut VcpuFd, cause: Cause) -> Result<AfterExit, KvmError> {
        let kicked = matches!(cause, Cause::Kick | Cause::AlarmAndKick);
        let VcpuPmu::Emulated(emulated) = &mut self.pmu else {
            return Ok(AfterExit { kicked, notices: Vec::new(), pauses: false });
        };
        // A branch changes it.
        let instruction = self.log.is_some().then(|| KvmRun::instruction_pointer_at_exit(fd));
        let BeforeEntry { wake, pause: pauses, notices, .. } = emulated.after_exit(cause, vm, fd)?;
        if let Some(timer) = &mut self.wake_timer {
            match wake {
                Wake::Unchanged => {}
                Wake::Never => timer.disarm(),
                Wake::After(time) => timer.arm(time),
            }
        }
        if let (Some(log), Some(instruction)) = (&self.log, instruction) {
            let entries = emulated.pmu.take_journal();
            if !entries.is_empty() {
                log.append(instruction, &entries);
            }
        }
        Ok(AfterExit { kicked, notices, pauses })
    }
}
