//! The PMU of one vCPU, on the thread that runs it.

use kvm_ioctls::{VcpuFd, VmFd};
use log::{info, trace};
use vpmu::Outcome;
use vpmu::model::{Model, none};
use vpmu::notice::Notice;
use vpmu::source::perf::PerfEvents;
use vpmu::x86::DEBUGCTL;

use super::Pmu;
use super::alarm::{self, ExitFlag};
use super::interrupt::{self, Entry};
use super::pulse::Pulse;
use crate::kvm::KvmError;
use crate::msr::{self, Written};

/// A vCPU's PMU. It stays on its thread, as its perf events do.
pub struct ThreadPmu {
    kind: Kind,
    flag: ExitFlag,
    /// Without one (too many timers) everything works but for what it is for.
    pulse: Option<Pulse>,
}

enum Kind {
    None,
    Kvm,
    Ours(Entry, Box<dyn Model<PerfEvents>>),
}

impl ThreadPmu {
    /// The PMU of a vCPU that this thread is going to run.
    ///
    /// # Safety
    /// `fd` has to outlive it.
    pub unsafe fn new(pmu: Pmu, fd: &mut VcpuFd) -> Self {
        let kind = match pmu {
            Pmu::None => Kind::None,
            Pmu::Kvm => Kind::Kvm,
            Pmu::Ours(shown, host) => {
                info!("each of its counters that is used is a pinned perf event of this thread");
                Kind::Ours(shown.entry(), shown.model(host))
            }
        };
        // SAFETY: the caller's promise.
        Self { kind, flag: unsafe { ExitFlag::of(fd) }, pulse: Pulse::new(alarm::signal()).ok() }
    }

    /// The guest reads a register that was handed over.
    pub fn read(&mut self, fd: &VcpuFd, msr: u32) -> Outcome {
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

    /// After every exit: looks at what has overflowed, and interrupts the guest if it wants that. What the operator is
    /// to know comes back.
    pub fn settle(&mut self, vm: &VmFd, fd: &mut VcpuFd) -> Result<Vec<Notice>, KvmError> {
        let came = self.flag.take();
        let Kind::Ours(entry, model) = &mut self.kind else { return Ok(Vec::new()) };
        let unit = model.unit();
        if came {
            if self.pulse.as_mut().is_some_and(Pulse::take) {
                unit.time_has_passed();
            } else {
                unit.look();
            }
        }
        if let Some(pulse) = &mut self.pulse {
            pulse.beat(unit.holds_counters());
        }
        if unit.take_interrupt() {
            trace!("is interrupted: a counter has overflowed");
            interrupt::deliver(vm, fd, *entry)?;
        }
        Ok(unit.take_notices())
    }
}
