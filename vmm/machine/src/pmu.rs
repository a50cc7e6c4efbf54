//! Which PMU the guest sees, and what it takes for it to see it.
//!
//! What was asked for ([`Choice`]) becomes a [`Pmu`] once it is known what the host can give ([`offer`]). Each vCPU's thread
//! answers for its PMU with counters of its own (`thread`). Signals call the thread out of the guest: when an alarm of a
//! counter has expired (`alarm`), and when the virtual PMU has to look at its counters (`timer`). How a PMU is accessed and how
//! it interrupts is the architecture's (`architecture.rs`).

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

/// What can be asked for.
pub type Choice = <Arch as Architecture>::Choice;
/// A PMU of Tally's, as the guest sees it.
pub type Shown = <Arch as Architecture>::Shown;
/// What the guest sees.
pub type Pmu = PmuOf<Arch>;
/// What becomes of a choice.
pub type Offer = architecture::Offer<Pmu>;
/// Why a PMU cannot be had.
pub type Unavailable = <Arch as Architecture>::Unavailable;
/// The host's processor, as far as PMUs go.
pub type Processor = <Arch as Architecture>::Processor;

/// Returns the host's processor.
pub fn processor(kvm: &Kvm) -> Result<Processor, KvmError> {
    Arch::processor(kvm)
}

/// Finds out what the guest can be offered on a host with that processor.
pub fn offer(
    choice: Choice,
    counters: Option<u32>,
    processor: Processor,
    policy: &Policy,
) -> Result<Offer, Unavailable> {
    Arch::offer(choice, counters, processor, policy)
}

/// Returns how many counters for any events the processor has on which this thread runs, if that can be known.
pub fn counters() -> Option<usize> {
    Arch::counters()
}

impl Pmu {
    /// Returns what is counted, in the guest's words.
    pub fn words(self, selection: Selection) -> String {
        match self {
            Self::Emulated(shown, host) => Arch::words(shown, host, selection),
            Self::None | Self::Kvm => selection.to_string(),
        }
    }

    /// Returns whether the kernel has to access this PMU in a way that can be handed over: see [`crate::Kernel::retarget`].
    pub fn needs_retargeting(self) -> bool {
        Arch::needs_retargeting(self)
    }

    /// Returns what a kernel has to be told of its processor, for this PMU.
    pub fn kernel_words(self, processor: Processor) -> Option<&'static str> {
        Arch::kernel_words(processor, self)
    }
}
