//! Everything that happens to a vCPU's counters, one entry each, for whoever keeps a log of it. Who takes the entries knows
//! when and where in the guest that was: they are taken at the exit that they belong to.

use crate::event::Selection;
use crate::notice::Notice;

/// Something that has happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    /// The guest has told a counter to count something else, or in another manner.
    Configured {
        /// Which counter.
        counter: usize,
        /// What it counts from now on, if anything.
        selection: Option<Selection>,
        /// Whether its overflows interrupt.
        interrupts: bool,
    },
    /// Counters have overflowed.
    Overflowed {
        /// Which, as a set.
        counters: u64,
        /// Whether that interrupts the guest.
        interrupts: bool,
    },
    /// What the operator is to know; here all of it is, however much that is.
    Noticed(Notice),
}

/// The entries that nobody has taken yet, if anybody wants them at all.
#[derive(Debug, Default)]
pub struct Journal(Option<Vec<Entry>>);

impl Journal {
    /// Begins to keep entries, or no longer does.
    pub fn keep(&mut self, kept: bool) {
        self.0 = kept.then(|| self.0.take().unwrap_or_default());
    }

    /// Adds one, if they are kept.
    pub fn add(&mut self, entry: impl FnOnce() -> Entry) {
        if let Some(entries) = &mut self.0 {
            entries.push(entry());
        }
    }

    /// Those since this was last asked.
    pub fn take(&mut self) -> Vec<Entry> {
        self.0.as_mut().map(std::mem::take).unwrap_or_default()
    }
}
