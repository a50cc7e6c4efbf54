//! The PMU of one vCPU, on the thread that runs it.

use kvm_ioctls::{VcpuFd, VmFd};
use vpmu::Outcome;
use vpmu::model::amd::Amd;
use vpmu::model::none;
use vpmu::notice::Notice;
use vpmu::source::perf::PerfEvents;

use super::alarm::{self, ExitFlag};
use super::pulse::Pulse;
use super::{Pmu, interrupt};
use crate::kvm::KvmError;

/// A vCPU's PMU. It stays on its thread, as its perf events do.
pub struct ThreadPmu {
    model: Model,
    flag: ExitFlag,
    /// Without one (too many timers) everything works but for what it is for.
    pulse: Option<Pulse>,
}

enum Model {
    None,
    Kvm,
    Amd(Box<Amd<PerfEvents>>),
}

impl ThreadPmu {
    /// The PMU of a vCPU that this thread is going to run.
    ///
    /// # Safety
    /// `fd` has to outlive it.
    pub unsafe fn new(pmu: Pmu, fd: &mut VcpuFd) -> Self {
        let model = match pmu {
            Pmu::None => Model::None,
            Pmu::Kvm => Model::Kvm,
            Pmu::Amd(version) => Model::Amd(Box::new(Amd::new(version, PerfEvents::new(alarm::signal())))),
        };
        // SAFETY: the caller's promise.
        Self { model, flag: unsafe { ExitFlag::of(fd) }, pulse: Pulse::new(alarm::signal()).ok() }
    }

    /// The guest reads a register that was handed over.
    pub fn read(&mut self, msr: u32) -> Outcome {
        match &mut self.model {
            Model::None => none::access(msr),
            Model::Kvm => Outcome::NotMine,
            Model::Amd(amd) => amd.read(msr),
        }
    }

    /// The guest writes one.
    pub fn write(&mut self, msr: u32, value: u64) -> Outcome {
        match &mut self.model {
            Model::None => none::access(msr),
            Model::Kvm => Outcome::NotMine,
            Model::Amd(amd) => amd.write(msr, value),
        }
    }

    /// After every exit: looks at what has overflowed, and interrupts the guest if it wants that. What the operator is
    /// to know comes back.
    pub fn settle(&mut self, vm: &VmFd, fd: &mut VcpuFd) -> Result<Vec<Notice>, KvmError> {
        let came = self.flag.take();
        let Model::Amd(amd) = &mut self.model else { return Ok(Vec::new()) };
        if came {
            if self.pulse.as_mut().is_some_and(Pulse::take) {
                amd.time_has_passed();
            } else {
                amd.alarm();
            }
        }
        if let Some(pulse) = &mut self.pulse {
            pulse.beat(amd.holds_counters());
        }
        if amd.take_interrupt() {
            interrupt::deliver(vm, fd)?;
        }
        Ok(amd.take_notices())
    }
}
