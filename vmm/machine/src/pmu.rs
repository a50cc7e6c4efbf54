//! The PMU that the guest sees, and its part on each vCPU's thread.
//!
//! [`offer`] turns the user's [`Choice`] into a [`Pmu`] that the host can provide. Each vCPU's thread handles the
//! accesses of its vCPU to the PMU, with perf events of its own (`thread`). Two signals make the thread leave the
//! guest: one when a counter's alarm expires (`alarm`), the other when the virtual PMU's timer expires (`timer`) or
//! another thread has a request. The architecture defines how the guest accesses the PMU and how the PMU interrupts
//! the guest (`architecture.rs`).

pub(crate) mod alarm;
pub(crate) mod journal;
pub(crate) mod thread;
mod timer;

use kvm_ioctls::Kvm;
use vpmu::event::Selection;
use vpmu::policy::Policy;

use crate::arch::Arch;
use crate::architecture::{self, Architecture, PmuOf};
use crate::kvm_error::KvmError;

/// A value of `--pmu`.
pub type Choice = <Arch as Architecture>::Choice;
/// The guest's view of an emulated PMU: its vendor and its counters.
pub type Shown = <Arch as Architecture>::Shown;
/// The PMU that the guest sees.
pub type Pmu = PmuOf<Arch>;
/// The PMU that this host can offer for a choice.
pub type Offer = architecture::Offer<Pmu>;
/// Why this host cannot offer a PMU.
pub type Unavailable = <Arch as Architecture>::Unavailable;
/// The properties of the host's processor that matter to PMUs.
pub type Processor = <Arch as Architecture>::Processor;

/// Returns the host's processor.
pub fn processor(kvm: &Kvm) -> Result<Processor, KvmError> {
    Arch::processor(kvm)
}

/// Determines the PMU that this host can offer the guest for a choice, a number of counters and a policy.
pub fn offer(
    choice: Choice,
    counters: Option<u32>,
    processor: Processor,
    policy: &Policy,
) -> Result<Offer, Unavailable> {
    Arch::offer(choice, counters, processor, policy)
}

/// Returns the number of general-purpose counters of the CPU on which this thread runs, or `None` if it cannot be found
/// out.
pub fn counters() -> Option<usize> {
    Arch::counters()
}

impl Pmu {
    /// Describes a selected event in the guest's terms.
    pub fn words(self, selection: Selection) -> String {
        match self {
            Self::Emulated(shown, host) => Arch::words(shown, host, selection),
            Self::None | Self::Kvm => selection.to_string(),
        }
    }

    /// Returns true if the kernel's accesses to this PMU reach Tally only after [`crate::Kernel::retarget`].
    pub fn needs_retargeting(self) -> bool {
        Arch::needs_retargeting(self)
    }

    /// Returns kernel parameters that a guest with this PMU needs on this processor, if there are any.
    pub fn kernel_words(self, processor: Processor) -> Option<&'static str> {
        Arch::kernel_words(processor, self)
    }
}
