//! An address at which an instruction is known to begin.

use super::site::Proof;

/// An address at which an instruction is known to begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Start {
    /// The address.
    pub address: u64,
    /// How it is known.
    pub kind: Proof,
    /// End of the function or instruction, if it is known. Without it, the instructions extend to the next start.
    pub end: Option<u64>,
}
