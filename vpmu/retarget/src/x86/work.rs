//! Bounds the work of a search, whatever the image is.

use std::cell::Cell;

/// Work that may still be done, in steps: a decoded instruction, or something of that order.
///
/// An image can be made so that each of millions of occurrences of RDPMC's bytes needs the decoding of the whole image.
/// No kernel is like that.
pub struct Work {
    left: Cell<u64>,
}

impl Work {
    /// Allows this number of steps.
    pub fn new(steps: u64) -> Self {
        Self { left: Cell::new(steps) }
    }

    /// Takes some steps. Returns false if fewer are left; then none are left afterwards.
    pub fn take(&self, steps: u64) -> bool {
        let left = self.left.get().checked_sub(steps);
        self.left.set(left.unwrap_or(0));
        left.is_some()
    }

    /// Returns true if no steps are left. What was found with the last of them proves nothing: decoding may have ended
    /// early.
    pub fn is_used_up(&self) -> bool {
        self.left.get() == 0
    }
}
