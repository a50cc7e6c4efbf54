//! Who is told what happens to a vCPU's counters.

use vpmu::journal::Entry;

/// Takes what happens to the counters of one vCPU, on that vCPU's own thread.
pub trait Journal: Send {
    /// Takes entries in the order in which they happened, and where the guest was when they were found: its instruction pointer.
    fn append(&self, place: u64, entries: &[Entry]);
}
