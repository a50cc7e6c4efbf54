//! The PMU of one vCPU, on the thread that runs it.

use kvm_ioctls::{VcpuFd, VmFd};
use log::{info, trace, warn};
use vpmu::notice::Notice;
use vpmu::policy::{OnStarvation, Policy};
use vpmu::report::Report;
use vpmu::unit::Switch;

use super::Pmu;
use super::alarm::{self, Called, Calls};
use super::pulse::{Due, Pulse, Rhythm};
use super::reminder::Reminder;
use crate::arch::exit;
use crate::arch::pmu::Front;
use crate::event_log::VcpuLog;
use crate::kvm::KvmError;
use crate::vcpu::Vcpu;

/// A vCPU's PMU. It stays on its thread, as its perf events do.
pub struct ThreadPmu {
    /// What it is.
    pub kind: Kind,
    calls: Calls,
    /// Without one (too many timers) everything works but for what it is for.
    pulse: Option<Pulse>,
    /// The same.
    reminder: Option<Reminder>,
    on_starvation: OnStarvation,
    log: Option<VcpuLog>,
}

/// What there is to do after an exit.
pub struct Settled {
    /// Whether a timer or another thread had called the thread out of the guest.
    pub called: bool,
    /// What the operator is to know.
    pub notices: Vec<Notice>,
    /// Whether the machine is not to go on like this.
    pub stops: bool,
}

/// Which PMU a vCPU has.
pub enum Kind {
    /// None.
    None,
    /// KVM's own.
    Kvm,
    /// One of Tally's.
    Ours(Box<Front>),
}

impl ThreadPmu {
    /// The PMU of a vCPU that this thread is going to run.
    pub fn new(vcpu: &Vcpu) -> Result<Self, KvmError> {
        let policy = &vcpu.policy;
        let kind = match vcpu.pmu {
            Pmu::None => Kind::None,
            Pmu::Kvm => Kind::Kvm,
            Pmu::Ours(shown, host) => {
                info!("what its counters count is counted by pinned perf events of this thread");
                let mut front = Front::new(shown, host, vcpu);
                front.model().obey(policy);
                Kind::Ours(Box::new(front))
            }
        };
        let calls = Calls::of(&vcpu.fd)?;
        let timeless = |error| warn!("no timer: what counters miss is told late ({error})");
        let pulse = Pulse::new(alarm::call()).map_err(timeless).ok();
        let reminder = Reminder::new(alarm::call()).ok();
        Ok(Self { kind, calls, pulse, reminder, on_starvation: policy.on_starvation, log: None })
    }

    /// Has all that happens to its counters logged.
    pub fn log_into(&mut self, log: VcpuLog, fd: &mut VcpuFd) {
        if let Kind::Ours(front) = &mut self.kind {
            front.model().unit().keep_journal(true);
            exit::keep_place(fd);
            self.log = Some(log);
        }
    }

    /// From now on does as the operator wants it to.
    pub fn obey(&mut self, policy: &Policy) {
        self.end();
        let Kind::Ours(front) = &mut self.kind else { return };
        front.model().obey(policy);
        self.on_starvation = policy.on_starvation;
        // What it was set for may be due earlier now.
        if let Some(reminder) = &mut self.reminder {
            reminder.came();
        }
    }

    /// Withholds a counter from the guest, or gives it back; whether it is Tally's, and there is one.
    pub fn switch(&mut self, counter: usize, to: Switch) -> bool {
        self.end();
        match &mut self.kind {
            Kind::Ours(front) => front.model().unit().switch(counter, to),
            Kind::None | Kind::Kvm => false,
        }
    }

    /// What there is to say of the counters, if they are Tally's.
    pub fn report(&mut self) -> Option<Report> {
        match &mut self.kind {
            Kind::Ours(front) => Some(front.model().report()),
            Kind::None | Kind::Kvm => None,
        }
    }

    /// After every exit, the guest's own or when it was called out: looks at what has overflowed, and interrupts the guest if
    /// it wants that.
    pub fn settle(&mut self, vm: &VmFd, fd: &mut VcpuFd, was_called: bool) -> Result<Settled, KvmError> {
        let was_looked = match &mut self.kind {
            Kind::Ours(front) => front.take(),
            Kind::None | Kind::Kvm => false,
        };
        let Called { by_alarm, otherwise: called } =
            if was_called { self.calls.take(fd) } else { Called::default() };
        let Kind::Ours(front) = &mut self.kind else {
            return Ok(Settled { called, notices: Vec::new(), stops: false });
        };
        let unit = front.model().unit();
        if by_alarm {
            unit.alarm(was_looked);
        }
        if called {
            match self.pulse.as_mut().and_then(Pulse::take) {
                // That was a look already.
                None if by_alarm => {}
                None => unit.look(),
                Some(Due::Look) => unit.beat(),
                Some(Due::GiveBack) => {
                    unit.beat();
                    unit.release_idle();
                }
            }
        }
        if let Some(pulse) = &mut self.pulse {
            pulse.set(match (unit.holds_counters(), unit.is_starved()) {
                (false, _) => Rhythm::Rests,
                (true, false) => Rhythm::Beats,
                (true, true) => Rhythm::Races,
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
            unit.told(is_handling);
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
        front.give(fd, by_alarm && is_handling);
        Ok(Settled { called, notices, stops })
    }

    /// Has all take effect for which the guest did not leave, before something that it leaves for.
    pub fn end(&mut self) {
        if let Kind::Ours(front) = &mut self.kind {
            front.end();
        }
    }

    /// The vCPU stands still from now on: its counters miss nothing.
    pub fn stands_still(&mut self) {
        if let Kind::Ours(front) = &mut self.kind {
            front.model().unit().stands_still();
        }
    }

    /// What the operator is to know if this happens.
    pub fn tell(&mut self, notice: Notice) -> Vec<Notice> {
        let Kind::Ours(front) = &mut self.kind else { return Vec::new() };
        front.model().unit().tell(notice);
        front.model().unit().take_notices()
    }

    /// Whether it is no reason any more for the machine to stand still.
    pub fn may_go_on(&mut self) -> bool {
        match &mut self.kind {
            Kind::Ours(front) => {
                self.on_starvation != OnStarvation::Stop || front.model().unit().has_hardware_again()
            }
            Kind::None | Kind::Kvm => true,
        }
    }
}
