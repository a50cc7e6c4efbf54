//! The PMU of one vCPU, on the thread that runs it.

use kvm_ioctls::{SyncReg, VcpuFd, VmFd};
use log::{info, trace, warn};
use vpmu::Outcome;
use vpmu::model::{Model, none};
use vpmu::notice::Notice;
use vpmu::policy::{OnStarvation, Policy};
use vpmu::report::Report;
use vpmu::source::perf::PerfEvents;
use vpmu::unit::Switch;
use vpmu::x86::DEBUGCTL;

use super::Pmu;
use super::alarm::{self, Called, Calls};
use super::interrupt::{Delivery, Line};
use super::pulse::{Due, Pulse, Rhythm};
use super::reminder::Reminder;
use super::slate::SharedSlate;
use crate::event_log::VcpuLog;
use crate::kvm::KvmError;
use crate::msr::{self, Written};

/// A vCPU's PMU. It stays on its thread, as its perf events do.
pub struct ThreadPmu {
    kind: Kind,
    calls: Calls,
    /// Without one (too many timers) everything works but for what it is for.
    pulse: Option<Pulse>,
    /// The same.
    reminder: Option<Reminder>,
    on_starvation: OnStarvation,
    log: Option<VcpuLog>,
    slate: Option<SharedSlate>,
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

enum Kind {
    None,
    Kvm,
    Ours(Line, Box<dyn Model<PerfEvents>>),
}

impl ThreadPmu {
    /// The PMU of a vCPU that this thread is going to run.
    pub fn new(
        pmu: Pmu,
        policy: &Policy,
        vcpu: u8,
        fd: &VcpuFd,
        slate: Option<SharedSlate>,
    ) -> Result<Self, KvmError> {
        let kind = match pmu {
            Pmu::None => Kind::None,
            Pmu::Kvm => Kind::Kvm,
            Pmu::Ours(shown, host) => {
                info!("what its counters count is counted by pinned perf events of this thread");
                let mut model = shown.model(host);
                model.obey(policy);
                Kind::Ours(Line::new(shown.entry(), vcpu), model)
            }
        };
        let calls = Calls::of(fd)?;
        let timeless = |error| warn!("no timer: what counters miss is told late ({error})");
        let pulse = Pulse::new(alarm::call()).map_err(timeless).ok();
        let reminder = Reminder::new(alarm::call()).ok();
        Ok(Self { kind, calls, pulse, reminder, on_starvation: policy.on_starvation, log: None, slate })
    }

    /// Has all that happens to its counters logged.
    pub fn log_into(&mut self, log: VcpuLog, fd: &mut VcpuFd) {
        if let Kind::Ours(_, model) = &mut self.kind {
            model.unit().keep_journal(true);
            // With each exit KVM then says where the guest is; to ask it would cost more than the rest of the logging.
            fd.set_sync_valid_reg(SyncReg::Register);
            self.log = Some(log);
        }
    }

    /// From now on does as the operator wants it to.
    pub fn obey(&mut self, policy: &Policy) {
        self.end_slate();
        let Kind::Ours(_, model) = &mut self.kind else { return };
        model.obey(policy);
        self.on_starvation = policy.on_starvation;
        // What it was set for may be due earlier now.
        if let Some(reminder) = &mut self.reminder {
            reminder.came();
        }
    }

    /// Withholds a counter from the guest, or gives it back; whether it is Tally's, and there is one.
    pub fn switch(&mut self, counter: usize, to: Switch) -> bool {
        self.end_slate();
        match &mut self.kind {
            Kind::Ours(_, model) => model.unit().switch(counter, to),
            Kind::None | Kind::Kvm => false,
        }
    }

    /// What there is to say of the counters, if they are Tally's.
    pub fn report(&mut self) -> Option<Report> {
        match &mut self.kind {
            Kind::Ours(_, model) => Some(model.report()),
            Kind::None | Kind::Kvm => None,
        }
    }

    /// The guest reads a register that was handed over.
    pub fn read(&mut self, fd: &VcpuFd, msr: u32) -> Outcome {
        self.end_slate();
        let outcome = self.read_quietly(fd, msr);
        trace!("reads {msr:#x}: {outcome}");
        outcome
    }

    fn read_quietly(&mut self, fd: &VcpuFd, msr: u32) -> Outcome {
        match &mut self.kind {
            Kind::None => none::access(msr),
            Kind::Kvm => Outcome::NotMine,
            Kind::Ours(_, model) if msr == DEBUGCTL => match (model.read(msr), msr::read(fd, msr)) {
                (Outcome::Value(ours), Ok(Some(kvms))) => Outcome::Value(ours | kvms),
                (outcome, _) => outcome,
            },
            Kind::Ours(_, model) => model.read(msr),
        }
    }

    /// The guest writes one.
    pub fn write(&mut self, fd: &VcpuFd, msr: u32, value: u64) -> Outcome {
        self.end_slate();
        let outcome = self.write_quietly(fd, msr, value);
        trace!("writes {value:#x} to {msr:#x}: {outcome}");
        outcome
    }

    fn write_quietly(&mut self, fd: &VcpuFd, msr: u32, value: u64) -> Outcome {
        match &mut self.kind {
            Kind::None => none::access(msr),
            Kind::Kvm => Outcome::NotMine,
            Kind::Ours(_, model) if msr == DEBUGCTL => {
                // The rest of it is KVM's, and refused if KVM does.
                let ours = value & vpmu::x86::FREEZE_AT_INTERRUPTS;
                match msr::write(fd, msr, value & !ours) {
                    Ok(Written::Yes) => model.write(msr, ours),
                    Ok(Written::No) | Err(_) => Outcome::Fault,
                }
            }
            Kind::Ours(_, model) => model.write(msr, value),
        }
    }

    /// After every exit, the guest's own or when it was called out: looks at what has overflowed, and interrupts the guest if
    /// it wants that.
    pub fn settle(&mut self, vm: &VmFd, fd: &mut VcpuFd, was_called: bool) -> Result<Settled, KvmError> {
        self.take_slate();
        let Called { by_alarm, otherwise: called } =
            if was_called { self.calls.take(fd) } else { Called::default() };
        let Kind::Ours(line, model) = &mut self.kind else {
            return Ok(Settled { called, notices: Vec::new(), stops: false });
        };
        let unit = model.unit();
        if by_alarm {
            unit.alarm();
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
                log.append(fd.sync_regs().regs.rip, &entries);
            }
        }
        let mut delivery = Delivery::None;
        if unit.take_interrupt() {
            trace!("is interrupted: a counter has overflowed");
            delivery = line.deliver(vm, fd)?;
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
        if let Some(slate) = &mut self.slate {
            // The handler of that is the next thing that the guest does; any other interrupt's may have to wait.
            if by_alarm && delivery == Delivery::Nmi {
                slate.offer(&mut **model);
            }
            slate.give(&mut **model, fd);
        }
        Ok(Settled { called, notices, stops })
    }

    /// The guest accesses a register in the ordinary way, after those for which it did not leave.
    fn end_slate(&mut self) {
        self.take_slate();
        if let Some(slate) = &mut self.slate {
            slate.stop();
        }
    }

    /// Has all register writes take effect for which the guest did not leave.
    fn take_slate(&mut self) {
        if let (Some(slate), Kind::Ours(_, model)) = (&mut self.slate, &mut self.kind) {
            slate.take(&mut **model);
        }
    }

    /// The vCPU stands still from now on: its counters miss nothing.
    pub fn stands_still(&mut self) {
        if let Kind::Ours(_, model) = &mut self.kind {
            model.unit().stands_still();
        }
    }

    /// What the operator is to know if this happens.
    pub fn tell(&mut self, notice: Notice) -> Vec<Notice> {
        let Kind::Ours(_, model) = &mut self.kind else { return Vec::new() };
        model.unit().tell(notice);
        model.unit().take_notices()
    }

    /// Whether it is no reason any more for the machine to stand still.
    pub fn may_go_on(&mut self) -> bool {
        match &mut self.kind {
            Kind::Ours(_, model) => {
                self.on_starvation != OnStarvation::Stop || model.unit().has_hardware_again()
            }
            Kind::None | Kind::Kvm => true,
        }
    }
}
