//! The PMU of one vCPU, on the thread that runs it.

use kvm_ioctls::{VcpuFd, VmFd};
use log::{info, warn};
use vpmu::notice::Notice;
use vpmu::policy::Policy;
use vpmu::report::Report;
use vpmu::{Cause, Next, Switch, VirtualPmu, Wake};
use vpmu_perf::PerfEvents;

use super::alarm::{self, Calls};
use super::journal::Journal;
use super::timer::Timer;
use crate::arch::Arch;
use crate::architecture::{Architecture, Front, Kind, KindOf, Pmu, PmuOf};
use crate::kvm_error::KvmError;
use crate::memory::GuestRam;

/// A vCPU's PMU. It cannot leave its thread, because its perf events count that thread.
pub struct ThreadPmu {
    /// The PMU.
    pub kind: KindOf<Arch>,
    calls: Calls,
    /// Timer for [`Wake`]. `None` if it could not be created: starved counters and delayed interrupts are then
    /// handled at the next exit.
    wake_timer: Option<Timer>,
    log: Option<Box<dyn Journal>>,
}

/// What a vCPU's PMU is created from, on the vCPU's own thread.
#[derive(Clone, Copy)]
pub struct Wiring<'a> {
    /// Number of the vCPU.
    pub id: u8,
    /// KVM's file descriptor of the vCPU.
    pub fd: &'a VcpuFd,
    /// The PMU that the guest sees.
    pub pmu: PmuOf<Arch>,
    /// The operator's policy for that PMU.
    pub policy: &'a Policy,
    /// State that all vCPUs of the machine share.
    pub buses: &'a <Arch as Architecture>::Buses,
    /// The guest's memory.
    pub ram: &'a GuestRam,
}

/// What to do after an exit.
pub struct Settled {
    /// A timer or another thread has called the vCPU out of the guest.
    pub called: bool,
    /// Notices for the operator.
    pub notices: Vec<Notice>,
    /// The machine has to pause, as the policy says for starvation.
    pub pauses: bool,
}

impl ThreadPmu {
    /// Creates the PMU of a vCPU that this thread is going to run.
    pub fn new(vcpu: &Wiring) -> Result<Self, KvmError> {
        let kind = match vcpu.pmu {
            Pmu::None => Kind::None,
            Pmu::Kvm => Kind::Kvm,
            Pmu::Emulated(shown, host) => {
                info!("what its counters count is counted by pinned perf events of this thread");
                let mut front = Arch::front(shown, host, vcpu.id, vcpu.buses, vcpu.ram);
                front.pmu().set_policy(vcpu.policy);
                Kind::Emulated(Box::new(front))
            }
        };
        let calls = Calls::of(vcpu.fd)?;
        let warn_no_timer = |error| warn!("no timer: what counters miss is told late ({error})");
        let wake_timer = Timer::new(alarm::call()).map_err(warn_no_timer).ok();
        Ok(Self { kind, calls, wake_timer, log: None })
    }

    fn emulated(&mut self) -> Option<&mut VirtualPmu<PerfEvents>> {
        match &mut self.kind {
            Kind::Emulated(front) => Some(front.pmu()),
            Kind::None | Kind::Kvm => None,
        }
    }

    /// Passes the events of the vCPU's counters to this journal from now on. Does nothing if the PMU is not emulated.
    pub fn log_into(&mut self, log: Box<dyn Journal>, fd: &mut VcpuFd) {
        if let Some(pmu) = self.emulated() {
            pmu.keep_journal(true);
            Arch::keep_place(fd);
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
    pub fn switch(&mut self, counter: usize, to: Switch) -> bool {
        self.emulated().is_some_and(|pmu| pmu.switch(counter, to))
    }

    /// Reports the counters. Returns `None` if the PMU is not emulated.
    pub fn report(&mut self) -> Option<Report> {
        self.emulated().map(VirtualPmu::report)
    }

    /// Handles overflows and timers after an exit, and injects an interrupt if one is due. Must be called after every
    /// exit. `was_called` is true if the guest itself has not caused the exit.
    pub fn settle(&mut self, vm: &VmFd, fd: &mut VcpuFd, was_called: bool) -> Result<Settled, KvmError> {
        let cause = if was_called { self.calls.take(fd) } else { Cause::Guest };
        let called = matches!(cause, Cause::Call | Cause::AlarmAndCall);
        let Kind::Emulated(front) = &mut self.kind else {
            return Ok(Settled { called, notices: Vec::new(), pauses: false });
        };
        let Next { wake, pause: pauses, notices } = front.after_exit(cause, vm, fd)?;
        if let Some(timer) = &mut self.wake_timer {
            match wake {
                Wake::Unchanged => {}
                Wake::Never => timer.disarm(),
                Wake::After(time) => timer.arm(time),
            }
        }
        if let Some(log) = &self.log {
            let entries = front.pmu().take_journal();
            if !entries.is_empty() {
                log.append(Arch::kept_place(fd), &entries);
            }
        }
        Ok(Settled { called, notices, pauses })
    }

    /// Records that the vCPU is paused from now on, so that its counters miss no events until it runs again.
    pub fn paused(&mut self) {
        if let Some(pmu) = self.emulated() {
            pmu.paused();
        }
    }

    /// Adds a notice for the operator. Returns all notices that were not returned before.
    pub fn tell(&mut self, notice: Notice) -> Vec<Notice> {
        self.emulated().map_or_else(Vec::new, |pmu| pmu.tell(notice))
    }

    /// Returns true if the PMU no longer requires the machine to pause.
    pub fn may_resume(&mut self) -> bool {
        self.emulated().is_none_or(VirtualPmu::may_resume)
    }
}
