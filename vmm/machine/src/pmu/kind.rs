//! Which PMU a guest sees, and which one a vCPU has, for any architecture.

use std::fmt;

/// What the guest sees: `S` is a PMU of Tally's, and `H` who counts for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pmu<S, H> {
    /// No PMU: none is announced, and its registers fault.
    None,
    /// KVM's own in-kernel vPMU.
    Kvm,
    /// Tally's.
    Emulated(S, H),
}

/// What becomes of a choice.
#[derive(Debug, PartialEq, Eq)]
pub struct Offer<P> {
    /// What the guest sees.
    pub pmu: P,
    /// What the user should know about it.
    pub remarks: Vec<String>,
}

/// What a vCPU has, on its thread: `F` is an emulated one.
pub enum Kind<F> {
    /// None.
    None,
    /// KVM's own.
    Kvm,
    /// One of Tally's.
    Emulated(Box<F>),
}

impl<S: fmt::Display, H> fmt::Display for Pmu<S, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => write!(f, "none"),
            Self::Kvm => write!(f, "KVM's own"),
            Self::Emulated(shown, _) => write!(f, "{shown}"),
        }
    }
}
