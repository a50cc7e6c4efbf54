//! The PMU that there is here: calls of the SBI, registers that are read by calls, and a local interrupt.
//!
//! The loader has the kernel make calls that KVM leaves to us ([`vpmu_retarget::riscv`]). Each vCPU's [`Front`] answers them,
//! and interrupts the guest.

mod offer;

use std::fmt;

use kvm_ioctls::{VcpuFd, VmFd};
use log::trace;
use vpmu::Outcome;
use vpmu::event::Selection;
use vpmu::model::Model;
use vpmu::model::riscv::{Answer, NUM_COUNTERS, OVERFLOWS, Riscv, Shape};
use vpmu_perf::{HostPmu, PerfEvents};
use vpmu_retarget::riscv::{READ_COUNTER, READ_OVERFLOWS};

use super::aia::Controllers;
use super::register::Register;
use super::sbi::NOT_SUPPORTED;
use crate::kvm::{Doing, KvmError};
use crate::pmu::Pmu;
use crate::pmu::thread::{Kind, ThreadPmu};
use crate::pmu::wiring::Wiring;
use crate::target::ACCESSES;

pub use self::offer::{Choice, Unavailable, offer};

/// The counters' interrupt among those of a CPU (Sscofpmf).
pub const OVERFLOW: u64 = 1 << 13;

/// The PMU of Tally's that is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shown(pub Shape);

/// Who counts for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Host {
    /// The host's PMU.
    pub pmu: HostPmu,
}

/// How many counters for any events the processor has on which this thread runs: there is no way to know.
pub fn counters() -> Option<usize> {
    None
}

impl Shown {
    /// What is counted, in the guest's words.
    pub fn words(self, _host: Host, selection: Selection) -> String {
        selection.to_string()
    }
}

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shape { programmable, overflows } = self.0;
        let overflows = if overflows {
            "overflow interrupts (Sscofpmf)"
        } else {
            "no overflow interrupt: it counts only"
        };
        write!(f, "RISC-V's PMU, cycle, instret and {programmable} programmable counters, {overflows}")
    }
}

impl Pmu {
    /// Whether the kernel has to access it in a way that can be handed over. A guest without counters has a PMU of none: it is
    /// Linux' driver that lets programs read the clock, and KVM takes that from CPUs that the guest starts.
    pub fn needs_retargeting(self) -> bool {
        self != Self::Kvm
    }

    /// Tells KVM, before the first vCPU exists: it is told for each vCPU.
    #[expect(clippy::unnecessary_wraps, reason = "other processors' KVM has to be told")]
    pub fn configure(self, _vm: &VmFd) -> Result<(), KvmError> {
        Ok(())
    }
}

/// Tally's PMU, as its guest's vCPU has it.
pub struct Front {
    model: Riscv<PerfEvents>,
    vcpu: u8,
    controllers: Controllers,
}

impl Front {
    /// That of a vCPU.
    pub fn new(shown: Shown, host: Host, vcpu: &Wiring) -> Self {
        let model = Riscv::new(shown.0, PerfEvents::new(host.pmu));
        Self { model, vcpu: vcpu.id, controllers: vcpu.buses.controllers.clone() }
    }

    /// What its registers mean.
    pub fn model(&mut self) -> &mut dyn Model<PerfEvents> {
        &mut self.model
    }

    /// There is no shared page: the guest leaves for every access.
    pub fn apply_page(&mut self) -> bool {
        false
    }

    /// There is no shared page to withdraw.
    pub fn end(&mut self) {}

    /// Interrupts the guest; whether the handler is the next thing that it does. It may not be: the interrupt may have to wait.
    /// A guest whose kernel is just about to wait does so before it takes the interrupt: KVM does not look there before it
    /// lets a vCPU sleep.
    pub fn interrupt(&mut self, _vm: &VmFd, fd: &mut VcpuFd) -> Result<bool, KvmError> {
        let waiting = Register::SIP.get(fd).doing("say which interrupts wait")?;
        Register::SIP.set(fd, waiting | OVERFLOW).doing("interrupt a vCPU")?;
        self.controllers.look_again(self.vcpu)?;
        Ok(false)
    }

    /// There is no shared page to prepare.
    pub fn prepare_page(&mut self, _fd: &VcpuFd, _is_handling: bool) {}
}

impl ThreadPmu {
    /// Whether it is asked by calls that come here.
    pub fn is_called(&self) -> bool {
        !matches!(self.kind, Kind::Kvm)
    }

    /// Whether it can count an event, as the guest writes it.
    pub fn has_event(&mut self, index: u64, data: u64) -> bool {
        match &mut self.kind {
            Kind::Emulated(front) => front.model.has_event(index, data),
            Kind::None | Kind::Kvm => false,
        }
    }

    /// The guest's kernel accesses it by a call.
    pub fn call(&mut self, function: u64, arguments: [u64; 6]) -> Answer {
        const NONE: Answer = Answer { error: 0, value: 0 };
        let Kind::Emulated(front) = &mut self.kind else {
            return if function == NUM_COUNTERS { NONE } else { NOT_SUPPORTED };
        };
        let model = &mut front.model;
        let register = match function {
            READ_COUNTER => u32::try_from(arguments[0]).ok(),
            READ_OVERFLOWS => Some(OVERFLOWS),
            _ => {
                let answer = model.call(function, arguments);
                trace!(target: ACCESSES, "calls {function} with {arguments:#x?}: {answer:?}");
                return answer;
            }
        };
        let outcome = register.map_or(Outcome::Fault, |register| model.read(register));
        trace!(target: ACCESSES, "reads {register:#x?}: {outcome}");
        match outcome {
            Outcome::Value(value) => Answer { error: 0, value },
            Outcome::Handled | Outcome::Fault | Outcome::NotMine => NOT_SUPPORTED,
        }
    }
}
