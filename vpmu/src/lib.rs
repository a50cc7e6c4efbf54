//! The virtual PMU of a guest, with no KVM in it: whoever runs a vCPU hands in its register accesses and acts on
//! the [`Outcome`].
//!
//! Data flows one way: a register access goes to a [`model`] (what does it mean?), from there to the [`bank`] (the
//! vCPU's counters: value, running, overflowed), from there to a [`source`] (who counts?). A model knows no source and
//! a source no model; what crosses the line is the vocabulary of [`event`] and the [`notice`]s for the operator.

pub mod bank;
pub mod event;
pub mod model;
pub mod notice;
pub mod retarget;
pub mod source;
pub mod x86;

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
