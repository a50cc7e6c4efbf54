//! The emulated RISC-V PMU: SBI calls, counter registers that are read with SBI calls too, and a local interrupt.
//!
//! The loader patches the kernel so that it accesses the PMU with SBI calls that KVM forwards to Tally
//! ([`vpmu_retarget::riscv`]). Each vCPU's [`Emulated`] answers the calls and interrupts the guest.

mod offer;

use std::convert::Infallible;
use std::fmt;

use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use log::trace;
use serde::{Deserialize, Serialize};
use vpmu::event::Selection;
use vpmu::model::riscv::{Answer, NUM_COUNTERS, OVERFLOWS, Shape};
use vpmu::policy::Policy;
use vpmu::sbi_page::{Page, Shared};
use vpmu::shared_page::LvtNote;
use vpmu::{Access, BeforeEntry, Cause, Injected, Outcome, Platform, VirtualPmu};
use vpmu_perf::EntryTicks;
use vpmu_retarget::riscv::{READ_COUNTER, READ_OVERFLOWS};

use super::aia::Controllers;
use super::host::Processor;
use super::register::Register;
use crate::architecture;
use crate::kvm_error::{Capability, KvmError, KvmResultExt};
use crate::memory::{GuestRam, InGuest, OfAtomics};
use crate::perf_events::perf_events;
use crate::target::ACCESSES;

pub use self::offer::{Choice, Unavailable};

/// The local counter-overflow interrupt in `sip` (Sscofpmf).
pub const OVERFLOW: u64 = 1 << 13;

/// The guest's view of an emulated PMU: its counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Model(pub Shape);

/// The PMU that the guest sees.
pub type Pmu = architecture::Pmu<Model, BackingPmu>;
/// The PMU that this host can offer for a choice.
pub type Offer = architecture::Offer<Pmu>;
/// A vCPU's PMU on the vCPU's thread.
pub type VcpuPmu = architecture::VcpuPmu<PmuWiring>;

/// The host's PMU, which counts for the emulated one.
pub type BackingPmu = architecture::BackingPmu<()>;

impl Model {
    /// Returns the host's processor.
    pub(crate) fn processor() -> Processor {
        Processor
    }

    /// Returns `None`: there is no way to find out the number of the processor's counters.
    pub(crate) fn host_counters() -> Option<usize> {
        None
    }

    /// Determines the PMU that this host can offer the guest for a choice, a number of counters and a policy.
    pub(crate) fn offer(
        choice: Choice,
        counters: Option<u32>,
        _: Processor,
        policy: &Policy,
    ) -> Result<Offer, Unavailable> {
        offer::offer(choice, counters, policy)
    }

    /// Determines whether this host can offer the PMU of a guest that was saved. With fewer free counters than the
    /// guest has, the policy decides.
    pub(crate) fn offer_saved(self, _: Processor, policy: &Policy) -> Result<Offer, Unavailable> {
        offer::saved::offer(self, policy)
    }

    /// Returns the KVM capabilities that a machine with this PMU needs beyond those of all machines.
    pub(crate) fn required_capabilities(_choice: Choice) -> &'static [Capability] {
        &[]
    }

    /// Returns a sentence for the user about the state of KVM's own PMU.
    pub(crate) fn kvm_pmu_state(_kvm: &Kvm) -> &'static str {
        "KVM's own PMU is switched off for each guest"
    }

    /// Does nothing: KVM's own PMU is configured for each vCPU, when the vCPU is set up.
    pub(crate) fn configure(_pmu: Pmu, _vm: &VmFd) -> Result<(), KvmError> {
        Ok(())
    }

    /// Returns true if the kernel's accesses to this PMU reach Tally only once its code was patched. It is also patched
    /// for a guest without counters. Linux' PMU driver then finds a PMU with no counters and lets programs read the
    /// clock: KVM resets that permission (`scounteren`) on CPUs that the guest starts.
    pub(crate) fn needs_retargeting(pmu: Pmu) -> bool {
        pmu != Pmu::Kvm
    }

    /// Returns a kernel parameter for a guest without a PMU. If the SBI has no PMU extension, Linux' legacy PMU driver
    /// assumes that `cycle` and `instret` can be read. The kernel dies if they cannot, so the driver is disabled.
    pub(crate) fn kernel_parameters(pmu: Pmu, _processor: Processor) -> Option<&'static str> {
        (pmu == Pmu::None).then_some("initcall_blacklist=riscv_pmu_legacy_devinit")
    }

    /// Returns what entries into a guest add to counts: nothing that anybody has seen.
    pub(crate) fn find_entry_ticks(_host: BackingPmu) -> Result<EntryTicks, Infallible> {
        Ok(EntryTicks::default())
    }

    /// Describes a selected event in the guest's terms.
    pub(crate) fn describe(self, _host: BackingPmu, selection: Selection) -> String {
        selection.to_string()
    }
}

impl fmt::Display for Model {
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

/// What an emulated PMU needs from the board.
pub struct Link {
    /// The interrupt controllers.
    pub controllers: Controllers,
    /// Address of the first vCPU's shared page, if the kernel uses such pages.
    pub pages: Option<u64>,
}

// SAFETY: all its fields are atomic integers, or arrays of them.
unsafe impl OfAtomics for Page {}

/// A vCPU's emulated PMU.
pub type Emulated = architecture::Emulated<PmuWiring>;

/// What connects an emulated PMU to its vCPU: the interrupt controllers.
pub struct PmuWiring {
    vcpu: u8,
    controllers: Controllers,
}

impl Emulated {
    /// Creates the emulated PMU of this vCPU. Must be called on the vCPU's thread.
    pub fn new(model: Model, host: BackingPmu, (vcpu, _): (u8, &VcpuFd), link: Link, ram: &GuestRam) -> Self {
        let Link { controllers, pages } = link;
        let mut pmu = VirtualPmu::riscv(model.0, perf_events(host.pmu));
        let address = pages.and_then(|first| first.checked_add(u64::from(vcpu) * Page::STRIDE as u64));
        if let Some(page) = address.and_then(|address| InGuest::<Page>::at(address, &ram.mapped)) {
            pmu.share_sbi_page(Shared { memory: Box::new(page), number: vcpu });
        }
        Self { pmu, entries: None, wiring: PmuWiring { vcpu, controllers } }
    }

    /// Handles overflows and timers after an exit. See [`VirtualPmu::after_exit`].
    pub fn after_exit(&mut self, cause: Cause, vm: &VmFd, fd: &mut VcpuFd) -> Result<BeforeEntry, KvmError> {
        let Self { pmu, wiring: PmuWiring { vcpu, controllers }, .. } = self;
        pmu.after_exit(cause, &mut Exited { vm, fd, vcpu: *vcpu, controllers })
    }
}

/// A vCPU that has left the guest.
struct Exited<'a> {
    vm: &'a VmFd,
    fd: &'a mut VcpuFd,
    vcpu: u8,
    controllers: &'a Controllers,
}

impl Platform for Exited<'_> {
    type Error = KvmError;

    /// Returns [`Injected::Pending`], because the handler may not be the next thing that the guest executes: the
    /// kernel may have masked the interrupt. A vCPU that executes WFI sleeps first, because KVM does not check this
    /// bit before it blocks the vCPU.
    fn inject(&mut self, _lvt_note: Option<LvtNote<'_>>) -> Result<Injected, KvmError> {
        let pending = Register::SIP.get(self.fd).operation("say which interrupts wait")?;
        Register::SIP.set(self.fd, pending | OVERFLOW).operation("interrupt a vCPU")?;
        self.controllers.recheck_pending(self.vm, self.vcpu)?;
        Ok(Injected::Pending)
    }
}

impl VcpuPmu {
    /// Returns true if Tally answers the guest's PMU calls. KVM answers them if the PMU is KVM's own.
    pub fn is_called(&self) -> bool {
        !matches!(self, Self::Kvm)
    }

    /// Returns whether an event, as the guest writes it, can be counted.
    pub fn has_event(&mut self, index: u64, data: u64) -> bool {
        match self {
            Self::Emulated(emulated) => emulated.pmu.has_event(index, data),
            Self::None | Self::Kvm => false,
        }
    }

    /// Handles a call by which the guest's kernel accesses its PMU.
    pub fn call(&mut self, function: u64, arguments: [u64; 6]) -> Answer {
        const NONE: Answer = Answer { error: 0, value: 0 };
        let Self::Emulated(emulated) = self else {
            return if function == NUM_COUNTERS { NONE } else { Answer::NOT_SUPPORTED };
        };
        let register = match function {
            READ_COUNTER => u32::try_from(arguments[0]).ok(),
            READ_OVERFLOWS => Some(OVERFLOWS),
            _ => {
                let answer = emulated.pmu.call(function, arguments);
                trace!(target: ACCESSES, "calls {function} with {arguments:#x?}: {answer:?}");
                return answer;
            }
        };
        let outcome = register.map_or(Outcome::Fault, |register| emulated.pmu.access(Access::Read(register)));
        trace!(target: ACCESSES, "reads {register:#x?}: {outcome}");
        match outcome {
            Outcome::Value(value) => Answer { error: 0, value },
            Outcome::Handled | Outcome::Fault | Outcome::NotHandled => Answer::NOT_SUPPORTED,
        }
    }
}
