//! Which PMU the guest sees, and what it takes for KVM to show it.
//!
//! What was asked for ([`Choice`]) becomes a [`Pmu`] once it is known what the host can give ([`offer`]). KVM is told which
//! registers to hand over ([`filter`]); each vCPU's thread answers for them with counters of its own ([`thread`]), is called
//! out of the guest when one has overflowed ([`alarm`]), or once in a while ([`pulse`]), or when an interrupt may be had
//! that had to wait ([`reminder`]), and interrupts the guest ([`interrupt`]). While its counters are frozen or stand still, a Linux
//! guest need not hand anything over ([`slate`]).

pub mod alarm;
mod filter;
mod interrupt;
mod offer;
mod pulse;
mod reminder;
mod slate;
pub mod thread;
mod timer;

use std::fmt;

use kvm_ioctls::{Cap, VmFd};
use vpmu::model::{Model, amd, intel};
use vpmu::slate::Registers;
use vpmu::source::perf::{HostPmu, PerfEvents};
use vpmu::x86::{Leaf, Vendor};

use crate::cpuid::Identity;
use crate::kvm::{KvmError, Need};

pub use self::offer::{Choice, Offer, offer};
pub use self::slate::SharedSlate;

/// What the guest sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pmu {
    /// No PMU: CPUID shows none, and its registers fault.
    None,
    /// KVM's own in-kernel vPMU.
    Kvm,
    /// Tally's.
    Ours(Shown, Host),
}

/// The PMU of Tally's that is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shown {
    /// Of AMD's kind.
    Amd(amd::Version),
    /// Of Intel's kind.
    Intel(intel::Shape),
}

/// Who counts for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Host {
    /// Who made the processor.
    pub vendor: Vendor,
    /// Its PMU.
    pub pmu: HostPmu,
}

impl Shown {
    /// Whose PMUs are like this.
    pub fn vendor(self) -> Vendor {
        match self {
            Self::Amd(_) => Vendor::Amd,
            Self::Intel(_) => Vendor::Intel,
        }
    }

    /// What its interrupt does to the local APIC's entry.
    fn entry(self) -> interrupt::Entry {
        match self {
            Self::Amd(_) => interrupt::Entry::Stays,
            Self::Intel(_) => interrupt::Entry::MasksItself,
        }
    }

    /// A vCPU's, on its own thread.
    fn model(self, host: Host) -> Box<dyn Model<PerfEvents>> {
        let source = PerfEvents::new(host.pmu);
        match self {
            Self::Amd(version) => Box::new(amd::Amd::new(version, host.vendor, source)),
            Self::Intel(shape) => Box::new(intel::Intel::new(shape, host.vendor, source)),
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

impl Pmu {
    /// Tells KVM, before the first vCPU exists.
    pub fn configure(self, vm: &VmFd) -> Result<(), KvmError> {
        match self {
            Self::Kvm => Ok(()),
            Self::None => filter::take_registers(vm, None),
            Self::Ours(shown, _) => filter::take_registers(vm, Some(shown.vendor())),
        }
    }

    /// Changes what CPUID says at `function` and, where it matters, `index`.
    pub fn show(self, function: u32, index: u32, leaf: &mut Leaf) {
        if self != Self::Kvm {
            vpmu::x86::hide_pmu(function, index, leaf);
        }
        match self {
            Self::Ours(Shown::Amd(version), _) => version.show(function, leaf),
            Self::Ours(Shown::Intel(shape), _) => shape.show(function, leaf),
            Self::None | Self::Kvm => {}
        }
    }

    /// The last CPUID function in which it has something to show, if there is one.
    pub fn last_function(self) -> Option<u32> {
        match self {
            Self::Ours(Shown::Amd(amd::Version::V2(_)), _) => Some(amd::Version::LAST_FUNCTION),
            Self::Ours(Shown::Intel(_), _) => Some(intel::Shape::FUNCTION),
            _ => None,
        }
    }

    /// Whether RDPMC has to be made something that can be handed over.
    pub fn needs_rdpmc(self) -> bool {
        matches!(self, Self::Ours(..))
    }

    /// The registers that a guest's kernel may access without leaving the guest while its counters are frozen, if any.
    pub fn slate(self) -> Option<Registers> {
        match self {
            Self::Ours(Shown::Amd(version), _) => version.slate(),
            Self::Ours(Shown::Intel(shape), _) => shape.slate(),
            Self::None | Self::Kvm => None,
        }
    }

    /// Whether `IA32_MISC_ENABLE` is to say that counters are there.
    pub fn is_monitoring(self) -> bool {
        matches!(self, Self::Ours(Shown::Intel(_), _))
    }

    /// What processor the guest has to see, for its kernel to find this PMU. That of a hybrid processor would promise PMUs of
    /// two kinds.
    pub fn identity(self) -> Identity {
        match self {
            Self::Ours(shown, host) if shown.vendor() != host.vendor => Identity::Generic(shown.vendor()),
            Self::Ours(Shown::Intel(_), host) if host.pmu.is_hybrid() => Identity::Generic(Vendor::Intel),
            _ => Identity::Host,
        }
    }
}

impl fmt::Display for Pmu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => write!(f, "none"),
            Self::Kvm => write!(f, "KVM's own"),
            Self::Ours(shown, _) => write!(f, "{shown}"),
        }
    }
}

/// What a KVM must be able to do for this choice, beyond what every machine needs.
pub fn needs(choice: Choice) -> &'static [Need] {
    match choice {
        Choice::Kvm => &[],
        _ => &[
            const { Need::new(Cap::X86UserSpaceMsr, "KVM_CAP_X86_USER_SPACE_MSR", "the PMU's registers") },
            const { Need::new(Cap::X86MsrFilter, "KVM_CAP_X86_MSR_FILTER", "handing over no other registers") },
            const {
                Need::new(
                    Cap::SyncRegs,
                    "KVM_CAP_SYNC_REGS",
                    "where the guest is at an overflow, for its log",
                )
            },
        ],
    }
}
