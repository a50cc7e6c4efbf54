//! The virtual PMU of a guest, with no KVM in it: whoever runs a vCPU hands in its register accesses and acts on
//! the [`Outcome`].
//!
//! Data flows one way: a register access goes to a [`model`] (what does it mean?), from there to the [`unit`] that all
//! makers' PMUs are (configured, stopped, overflowed), to its [`bank`] (the values of the counters), and to a [`source`]
//! (who counts?). Each knows only the next. What crosses the lines is the vocabulary of [`event`], into which a
//! [`translation`] puts another vendor's, and the [`notice`]s for the operator.

mod bank;
pub mod event;
mod event_mapper;
pub mod journal;
mod mask;
pub mod model;
pub mod notice;
mod pmu;
pub mod policy;
pub mod report;
pub mod shared_page;
pub mod source;
pub mod translation;
mod unit;
pub mod x86;

pub use pmu::{Access, Cause, Injected, Next, Platform, Switch, VirtualPmu, Wake};

use std::fmt;

/// What becomes of a register access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The write took effect.
    Handled,
    /// The read gives this.
    Value(u64),
    /// The access is an error: #GP on x86.
    Fault,
    /// The register belongs to something else.
    NotMine,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Handled => write!(f, "done"),
            Self::Value(value) => write!(f, "{value:#x}"),
            Self::Fault => write!(f, "a fault"),
            Self::NotMine => write!(f, "not the PMU's"),
        }
    }
}
