//! Results of a register access, and of an injected interrupt.

use std::fmt;

/// Result of a register access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The write took effect.
    Handled,
    /// Value that the read returns.
    Value(u64),
    /// The access is an error: #GP on x86.
    Fault,
    /// Not a register of this PMU.
    NotHandled,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Handled => write!(f, "done"),
            Self::Value(value) => write!(f, "{value:#x}"),
            Self::Fault => write!(f, "a fault"),
            Self::NotHandled => write!(f, "not the PMU's"),
        }
    }
}

/// Whether the guest takes the interrupt at the next entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Injected {
    /// The handler is the next thing that the guest executes.
    AtNextEntry,
    /// The guest takes the interrupt later, or has masked it.
    Pending,
}
