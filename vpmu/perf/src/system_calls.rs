//! Counts the system calls that a thread makes for its events.

use std::cell::Cell;
use std::rc::Rc;

/// Number of system calls made for the events of a thread, which share it.
#[derive(Clone, Default)]
pub struct SystemCalls(Rc<Cell<u64>>);

impl SystemCalls {
    /// Returns the number of system calls so far.
    pub fn count(&self) -> u64 {
        self.0.get()
    }

    /// Adds to the number.
    pub fn add(&self, calls: u64) {
        self.0.set(self.0.get().wrapping_add(calls));
    }
}
