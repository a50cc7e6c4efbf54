//! The guest's PMU on x86: its MSRs, and its interrupt through the local APIC.
//!
//! An MSR filter makes KVM exit on accesses to the PMU's registers ([`filter`]). Each vCPU's [`Front`] emulates the
//! registers and interrupts the guest at an overflow ([`interrupt`]). While its counters are frozen or stand still, a
//! Linux guest can access the registers without an exit ([`guest_page`]).

mod counters;
pub mod filter;
pub mod guest_page;
mod interrupt;
mod offer;

use std::fmt;
use std::sync::atomic::AtomicU64;

use kvm_ioctls::{VcpuFd, VmFd};
use log::trace;
use vpmu::event::Selection;
use vpmu::model::{amd, intel, none};
use vpmu::shared_page::Registers;
use vpmu::translation::Translation;
use vpmu::x86::{DEBUGCTL, Leaf, Vendor};
use vpmu::{Access, Cause, Injected, Next, Outcome, Platform, VirtualPmu};
use vpmu_perf::{HostPmu, PerfEvents};

use super::msr::{self, Written};
use crate::architecture;
use crate::kvm_error::KvmError;
use crate::target::ACCESSES;
use guest_page::{Confirmation, GuestPage};
use interrupt::{Delivery, LvtEntry};

pub use self::counters::counters;
pub use self::offer::{Choice, Unavailable, offer};

/// The emulated PMU's model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shown {
    /// An AMD PMU of this version.
    Amd(amd::Version),
    /// Intel's architectural PMU with this version and these counters.
    Intel(intel::Shape),
}

/// The PMU that the guest sees.
pub type Pmu = architecture::Pmu<Shown, Host>;
/// The PMU for a choice, with remarks for the user.
pub type Offer = architecture::Offer<Pmu>;
/// The PMU of a vCPU.
pub type Kind = architecture::Kind<Front>;

/// The host's PMU, which counts for the emulated one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Host {
    /// Vendor of the processor.
    pub vendor: Vendor,
    /// The processor's PMU.
    pub pmu: HostPmu,
}

impl Shown {
    /// Returns the vendor of the model.
    pub fn vendor(self) -> Vendor {
        match self {
            Self::Amd(_) => Vendor::Amd,
            Self::Intel(_) => Vendor::Intel,
        }
    }

    /// Returns a description of an event selection, in the terms of the guest's PMU.
    pub fn words(self, host: Host, selection: Selection) -> String {
        Translation { guest: self.vendor(), host: host.vendor }.describe(selection)
    }

    /// Returns what an interrupt does to the LVT entry.
    fn on_delivery(self) -> interrupt::OnDelivery {
        match self {
            Self::Amd(_) => interrupt::OnDelivery::Unchanged,
            Self::Intel(_) => interrupt::OnDelivery::SetsMask,
        }
    }

    /// Creates the virtual PMU of a vCPU, on the vCPU's own thread.
    fn virtual_pmu(self, host: Host) -> VirtualPmu<PerfEvents> {
        let source = PerfEvents::new(host.pmu);
        match self {
            Self::Amd(version) => VirtualPmu::amd(version, host.vendor, source),
            Self::Intel(shape) => VirtualPmu::intel(shape, host.vendor, source),
        }
    }
}

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Amd(amd::Version::V2(counters)) => {
                write!(f, "AMD's PMU with PerfMonV2, {counters} counters")
            }
            Self::Amd(version) => write!(f, "AMD's PMU without PerfMonV2, {} counters", version.counters()),
            Self::Intel(shape) => {
                let version = match shape.version {
                    intel::Version::V2 => 2,
                    intel::Version::V5 => 5,
                };
                write!(
                    f,
                    "Intel's PMU, version {version}, {} general and {} fixed counters, absent events {:#x}",
                    shape.general, shape.fixed, shape.absent
                )
            }
        }
    }
}

/// Vendor and model of the processor that CPUID shows to the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Identity {
    /// The host's processor.
    Host,
    /// A fixed model of this vendor, independent of the host's model (see `cpuid::identity`).
    Generic(Vendor),
}

impl Pmu {
    /// Changes a CPUID leaf so that it describes this PMU. `index` matters only for functions with several leaves.
    pub fn show(self, function: u32, index: u32, leaf: &mut Leaf) {
        if self != Self::Kvm {
            vpmu::x86::hide_pmu(function, index, leaf);
        }
        match self {
            Self::Emulated(Shown::Amd(version), _) => version.show(function, leaf),
            Self::Emulated(Shown::Intel(shape), _) => shape.show(function, leaf),
            Self::None | Self::Kvm => {}
        }
    }

    /// Returns the last CPUID function that describes this PMU, if there is one.
    pub fn last_function(self) -> Option<u32> {
        match self {
            Self::Emulated(Shown::Amd(amd::Version::V2(_)), _) => Some(amd::Version::LAST_FUNCTION),
            Self::Emulated(Shown::Intel(_), _) => Some(intel::Shape::FUNCTION),
            _ => None,
        }
    }

    /// Returns the registers that the guest's kernel may access on the shared page while its counters are frozen.
    pub fn page_registers(self) -> Option<Registers> {
        match self {
            Self::Emulated(Shown::Amd(version), _) => version.page_registers(),
            Self::Emulated(Shown::Intel(shape), _) => shape.page_registers(),
            Self::None | Self::Kvm => None,
        }
    }

    /// Returns true if `IA32_MISC_ENABLE` has to show that performance monitoring is available.
    pub fn is_monitoring(self) -> bool {
        matches!(self, Self::Emulated(Shown::Intel(_), _))
    }

    /// Returns the processor that CPUID has to show so that the guest's kernel finds this PMU. The identity of a hybrid
    /// processor would make the kernel expect PMUs of two kinds.
    pub fn identity(self) -> Identity {
        match self {
            Self::Emulated(shown, host) if shown.vendor() != host.vendor => Identity::Generic(shown.vendor()),
            Self::Emulated(Shown::Intel(_), host) if host.pmu.is_hybrid() => Identity::Generic(Vendor::Intel),
            _ => Identity::Host,
        }
    }
}

/// An emulated PMU as one vCPU sees it: its registers, and the LVT entry that its overflow interrupt goes through.
pub struct Front {
    pmu: VirtualPmu<PerfEvents>,
    lvt: LvtEntry,
    confirmation: Confirmation,
}

impl Front {
    /// Creates the PMU of a vCPU, on the vCPU's own thread.
    pub fn new(shown: Shown, host: Host, vcpu: u8, page: Option<GuestPage>) -> Self {
        let mut pmu = shown.virtual_pmu(host);
        if let Some(page) = page {
            pmu.share_page(Box::new(page));
        }
        let lvt = LvtEntry::new(shown.on_delivery(), vcpu);
        Self { pmu, lvt, confirmation: Confirmation::new(vcpu) }
    }
}

impl architecture::Front for Front {
    fn pmu(&mut self) -> &mut VirtualPmu<PerfEvents> {
        &mut self.pmu
    }

    fn after_exit(&mut self, cause: Cause, vm: &VmFd, fd: &mut VcpuFd) -> Result<Next, KvmError> {
        let Self { pmu, lvt, confirmation } = self;
        pmu.after_exit(cause, &mut Exited { vm, fd, lvt, confirmation })
    }
}

/// A vCPU outside its guest, as the virtual PMU accesses it.
struct Exited<'a> {
    vm: &'a VmFd,
    fd: &'a mut VcpuFd,
    lvt: &'a mut LvtEntry,
    confirmation: &'a mut Confirmation,
}

impl Platform for Exited<'_> {
    type Error = KvmError;

    fn inject(&mut self, lvt_entry: Option<&AtomicU64>) -> Result<Injected, KvmError> {
        Ok(match self.lvt.deliver(self.vm, self.fd, lvt_entry)? {
            Delivery::Nmi => Injected::TakenAtOnce,
            Delivery::None | Delivery::Fixed { .. } => Injected::Otherwise,
        })
    }

    fn uses_shared_page(&mut self) -> bool {
        self.confirmation.confirm(self.fd)
    }
}

impl Kind {
    /// Handles an RDMSR that has left the guest.
    pub fn read(&mut self, fd: &VcpuFd, msr: u32) -> Outcome {
        let outcome = match self {
            Kind::None => none::access(msr),
            Kind::Kvm => Outcome::NotMine,
            Kind::Emulated(front) => match (front.pmu.access(Access::Read(msr)), msr) {
                // KVM emulates the other bits of the register.
                (Outcome::Value(ours), DEBUGCTL) => {
                    let kvms = msr::read(fd, msr).ok().flatten();
                    Outcome::Value(ours | kvms.unwrap_or_default())
                }
                (outcome, _) => outcome,
            },
        };
        trace!(target: ACCESSES, "reads {msr:#x}: {outcome}");
        outcome
    }

    /// Handles a WRMSR that has left the guest.
    pub fn write(&mut self, fd: &VcpuFd, msr: u32, value: u64) -> Outcome {
        let outcome = match self {
            Kind::None => none::access(msr),
            Kind::Kvm => Outcome::NotMine,
            Kind::Emulated(front) if msr == DEBUGCTL => {
                // KVM emulates the other bits of the register. A write that KVM rejects faults.
                let ours = value & vpmu::x86::FREEZE_AT_INTERRUPTS;
                match msr::write(fd, msr, value & !ours) {
                    Ok(Written::Yes) => front.pmu.access(Access::Write(msr, ours)),
                    Ok(Written::No) | Err(_) => Outcome::Fault,
                }
            }
            Kind::Emulated(front) => front.pmu.access(Access::Write(msr, value)),
        };
        trace!(target: ACCESSES, "writes {value:#x} to {msr:#x}: {outcome}");
        outcome
    }
}
