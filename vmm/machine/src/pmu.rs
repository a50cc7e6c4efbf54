//! Which PMU the guest sees, and what it takes for it to see it.
//!
//! What was asked for ([`Choice`]) becomes a [`Pmu`] once it is known what the host can give ([`offer`]). Each vCPU's thread
//! answers for its PMU with counters of its own ([`thread`]). Signals call the thread out of the guest: when an alarm of a
//! counter has expired ([`alarm`]), and when the virtual PMU has to look at its counters ([`timer`]). How a PMU is accessed and how
//! it interrupts is the architecture's ([`crate::arch::pmu`]).

pub(crate) mod alarm;
pub(crate) mod journal;
pub(crate) mod thread;
mod timer;
pub(crate) mod wiring;

use std::fmt;

use vpmu::event::Selection;

pub use crate::arch::pmu::{Choice, Host, Shown, Unavailable, counters, offer};

/// What the guest sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pmu {
    /// No PMU: none is announced, and its registers fault.
    None,
    /// KVM's own in-kernel vPMU.
    Kvm,
    /// Tally's.
    Emulated(Shown, Host),
}

/// What becomes of a choice.
#[derive(Debug, PartialEq, Eq)]
pub struct Offer {
    /// What the guest sees.
    pub pmu: Pmu,
    /// What the user should know about it.
    pub remarks: Vec<String>,
}

impl Pmu {
    /// Returns what is counted, in the guest's words.
    pub fn words(self, selection: Selection) -> String {
        match self {
            Self::Emulated(shown, host) => shown.words(host, selection),
            Self::None | Self::Kvm => selection.to_string(),
        }
    }
}

impl fmt::Display for Pmu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => write!(f, "none"),
            Self::Kvm => write!(f, "KVM's own"),
            Self::Emulated(shown, _) => write!(f, "{shown}"),
        }
    }
}
