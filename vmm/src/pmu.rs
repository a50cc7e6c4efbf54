//! Which PMU the guest sees, and what it takes for KVM to show it.
//!
//! What was asked for ([`Choice`]) becomes a [`Pmu`] once it is known what the host can give ([`offer`]). KVM is told which
//! registers to hand over ([`filter`]); each vCPU's thread answers for them with counters of its own ([`thread`]), is called
//! out of the guest when one has overflowed ([`alarm`]), or once in a while ([`pulse`]), and interrupts the guest ([`interrupt`]).

pub mod alarm;
mod filter;
mod interrupt;
mod offer;
mod pulse;
pub mod thread;

use kvm_ioctls::{Cap, VmFd};
use vpmu::model::amd::Version;
use vpmu::x86::Leaf;

use crate::kvm::KvmError;

pub use self::offer::{Choice, Offer, offer};

/// What the guest sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pmu {
    /// No PMU: CPUID shows none, and its registers fault.
    None,
    /// KVM's own in-kernel vPMU.
    Kvm,
    /// Tally's, of AMD's kind.
    Amd(Version),
}

impl Pmu {
    /// Tells KVM, before the first vCPU exists.
    pub fn configure(self, vm: &VmFd) -> Result<(), KvmError> {
        match self {
            Self::Kvm => Ok(()),
            Self::None => filter::take_registers(vm, filter::Rdpmc::Left),
            Self::Amd(_) => filter::take_registers(vm, filter::Rdpmc::Taken),
        }
    }

    /// Changes what CPUID says at `function` and, where it matters, `index`.
    pub fn show(self, function: u32, index: u32, leaf: &mut Leaf) {
        if self != Self::Kvm {
            vpmu::x86::hide_pmu(function, index, leaf);
        }
        if let Self::Amd(version) = self {
            version.show(function, leaf);
        }
    }

    /// The last extended CPUID function in which it has something to show, if there is one.
    pub fn last_extended_function(self) -> Option<u32> {
        match self {
            Self::Amd(Version::V2(_)) => Some(Version::LAST_FUNCTION),
            _ => None,
        }
    }

    /// Whether RDPMC has to be made something that can be handed over.
    pub fn needs_rdpmc(self) -> bool {
        matches!(self, Self::Amd(_))
    }
}

/// What a KVM must be able to do for this choice, beyond what every machine needs.
pub fn needs(choice: Choice) -> &'static [(Cap, &'static str)] {
    match choice {
        Choice::Kvm => &[],
        Choice::None | Choice::Auto | Choice::Amd | Choice::AmdLegacy => &[
            (Cap::X86UserSpaceMsr, "KVM_CAP_X86_USER_SPACE_MSR"),
            (Cap::X86MsrFilter, "KVM_CAP_X86_MSR_FILTER"),
        ],
    }
}
