//! The PMU of one vCPU, on the thread that runs it.

use kvm_ioctls::{VcpuFd, VmFd};
use log::{info, trace, warn};
use vpmu::notice::Notice;
use vpmu::policy::{OnStarvation, Policy};
use vpmu::report::Report;
use vpmu::unit::Switch;

use super::Pmu;
use super::alarm::{self, Called, Calls};
use super::journal::Journal;
use super::poll_timer::{Due, PollTimer, Rhythm};
use super::reminder::Reminder;
use super::wiring::Wiring;
use crate::arch::exit;
use crate::arch::pmu::Front;
use crate::kvm::KvmError;

/// A vCPU's PMU. It stays on its thread, as its perf events do.
pub struct ThreadPmu {
    /// Which PMU it is.
    pub kind: Kind,
    calls: Calls,
    /// `None` if there are too many timers; lost counters are then found late.
    poll_timer: Option<PollTimer>,
    /// `None` if there are too many timers; withheld interrupts then wait for the next exit.
    reminder: Option<Reminder>,
    on_starvation: OnStarvation,
    log: Option<Box<dyn Journal>>,
}

/// What to do after an exit.
pub struct Settled {
    /// A timer or another thread has called the vCPU out of the guest.
    pub called: bool,
    /// Notices for the operator.
    pub notices: Vec<Notice>,
    /// The machine has to stand still, as the policy says for starvation.
    pub stops: bool,
}

/// Which PMU a vCPU has.
pub enum Kind {
    /// None.
    None,
    /// KVM's own.
    Kvm,
    /// One of Tally's.
    Emulated(Box<Front>),
}

impl ThreadPmu {
    /// The PMU of a vCPU that this thread is going to run.
    pub fn new(vcpu: &Wiring) -> Result<Self, KvmError> {
        let policy = vcpu.policy;
        let kind = match vcpu.pmu {
            Pmu::None => Kind::None,
            Pmu::Kvm => Kind::Kvm,
            Pmu::Emulated(shown, host) => {
                info!("what its counters count is counted by pinned perf events of this thread");
                let mut front = Front::new(shown, host, vcpu);
                front.model().set_policy(policy);
                Kind::Emulated(Box::new(front))
            }
        };
        let calls = Calls::of(vcpu.fd)?;
        let timeless = |error| warn!("no timer: what counters miss is told late ({error})");
        let poll_timer = PollTimer::new(alarm::call()).map_err(timeless).ok();
        let reminder = Reminder::new(alarm::call()).ok();
        Ok(Self { kind, calls, poll_timer, reminder, on_starvation: policy.on_starvation, log: None })
    }

    /// Has all that happens to its counters logged.
    pub fn log_into(&mut self, log: Box<dyn Journal>, fd: &mut VcpuFd) {
        if let Kind::Emulated(front) = &mut self.kind {
            front.model().unit().keep_journal(true);
            exit::keep_place(fd);
            self.log = Some(log);
        }
    }

    /// Sets the policy.
    pub fn set_policy(&mut self, policy: &Policy) {
        self.end();
        let Kind::Emulated(front) = &mut self.kind else { return };
        front.model().set_policy(policy);
        self.on_starvation = policy.on_starvation;
        // A withheld interrupt may be due earlier now.
        if let Some(reminder) = &mut self.reminder {
            reminder.came();
        }
    }

    /// Enables or disables a counter for the guest. Returns false if there is no such counter of an emulated PMU.
    pub fn switch(&mut self, counter: usize, to: Switch) -> bool {
        self.end();
        match &mut self.kind {
            Kind::Emulated(front) => front.model().unit().switch(counter, to),
            Kind::None | Kind::Kvm => false,
        }
    }

    /// Reports the counters of an emulated PMU.
    pub fn report(&mut self) -> Option<Report> {
        match &mut self.kind {
            Kind::Emulated(front) => Some(front.model().report()),
            Kind::None | Kind::Kvm => None,
        }
    }

    /// Handles overflows and timers after an exit, and injects an interrupt if one is due. Must be called after every exit.
    pub fn settle(&mut self, vm: &VmFd, fd: &mut VcpuFd, was_called: bool) -> Result<Settled, KvmError> {
        let is_updated = match &mut self.kind {
            Kind::Emulated(front) => front.apply_page(),
            Kind::None | Kind::Kvm => false,
        };
        let Called { by_alarm, otherwise: called } =
            if was_called { self.calls.take(fd) } else { Called::default() };
        let Kind::Emulated(front) = &mut self.kind else {
            return Ok(Settled { called, notices: Vec::new(), stops: false });
        };
        let unit = front.model().unit();
        if by_alarm {
            unit.alarm(is_updated);
        }
        if called {
            match self.poll_timer.as_mut().and_then(PollTimer::take) {
                // The alarm has updated all counters already.
                None if by_alarm => {}
                None => unit.look(),
                Some(Due::Look) => unit.poll(),
                Some(Due::GiveBack) => {
                    unit.poll();
                    unit.release_idle();
                }
            }
        }
        if let Some(poll_timer) = &mut self.poll_timer {
            poll_timer.set(match (unit.holds_counters(), unit.is_starved()) {
                (false, _) => Rhythm::Off,
                (true, false) => Rhythm::Usual,
                (true, true) => Rhythm::Short,
            });
        }
        if let Some(log) = &self.log {
            let entries = unit.take_entries();
            if !entries.is_empty() {
                log.append(exit::kept_place(fd), &entries);
            }
        }
        let mut is_handling = false;
        if unit.take_interrupt() {
            trace!("is interrupted: a counter has overflowed");
            is_handling = front.interrupt(vm, fd)?;
        }
        let unit = front.model().unit();
        if by_alarm {
            unit.interrupt_injected(is_handling);
        }
        if let Some(reminder) = &mut self.reminder {
            if called {
                reminder.came();
            }
            if let Some(left) = unit.withholds_interrupt() {
                reminder.set(left);
            }
        }
        let stops = self.on_starvation == OnStarvation::Stop && unit.is_starved();
        let notices = unit.take_notices();
        front.prepare_page(fd, by_alarm && is_handling);
        Ok(Settled { called, notices, stops })
    }

    /// Applies what the guest did on its shared page, before an ordinary access.
    pub fn end(&mut self) {
        if let Kind::Emulated(front) = &mut self.kind {
            front.end();
        }
    }

    /// Records that the vCPU stands still from now on: its counters miss nothing.
    pub fn stands_still(&mut self) {
        if let Kind::Emulated(front) = &mut self.kind {
            front.model().unit().stands_still();
        }
    }

    /// Adds a notice, and takes all notices for the operator.
    pub fn tell(&mut self, notice: Notice) -> Vec<Notice> {
        let Kind::Emulated(front) = &mut self.kind else { return Vec::new() };
        front.model().unit().tell(notice);
        front.model().unit().take_notices()
    }

    /// Returns true if the PMU no longer requires the machine to stand still.
    pub fn may_go_on(&mut self) -> bool {
        match &mut self.kind {
            Kind::Emulated(front) => {
                self.on_starvation != OnStarvation::Stop || front.model().unit().has_hardware_again()
            }
            Kind::None | Kind::Kvm => true,
        }
    }
}
