//! The virtual PMU of a guest, with no KVM in it: whoever runs a vCPU hands in its register accesses and acts on
//! the [`Outcome`].
//!
//! For now a guest has no PMU at all, and honestly so: what it finds is what hardware without one shows.

pub mod model;
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
