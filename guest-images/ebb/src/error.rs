//! What can go wrong.

use std::io;

/// Why there are no event-based branches.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refuses something.
    #[error("cannot {action}: {source}")]
    System {
        /// What was tried.
        action: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// The description of an event has something that event-based branches do not have.
    #[error("event-based branches: {0}")]
    Refused(&'static str),
    /// All slots of the thread's block are used, or the event has one already.
    #[error("event-based branches: the thread has a slot for this event already, or no free slot")]
    NoSlot,
    /// Others have the processor's counters.
    #[error("event-based branches: others hold all counters that could count the event")]
    NoCounter,
    /// The event counts, and nobody serves the thread's block.
    #[error("event-based branches: this machine does not have them, or its operator has switched them off")]
    NotOffered,
}

impl Error {
    /// The last error of a system call.
    pub(crate) fn last(action: &'static str) -> Self {
        Self::System { action, source: io::Error::last_os_error() }
    }
}
