//! The interface through which a program receives the events of a vCPU's counters.

use vpmu::journal::Entry;

/// Receives the events of one vCPU's counters, on that vCPU's own thread.
pub trait Journal: Send {
    /// Appends entries, in the order in which they happened. `place` is the guest's instruction pointer at the exit
    /// at which they were found.
    fn append(&self, place: u64, entries: &[Entry]);
}
