//! Journal of everything that happens to a vCPU's counters, for an event log. The VMM takes the entries at the exit in
//! which they were made, so entries have no time and no guest address.

use crate::event::Selection;
use crate::notice::Notice;

/// Something that happened to a vCPU's counters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    /// The guest has changed the configuration of a counter.
    Configured {
        /// The counter.
        counter: usize,
        /// What it counts from now on, if anything.
        selection: Option<Selection>,
        /// Overflow interrupt enabled.
        interrupts: bool,
    },
    /// Counters have overflowed.
    Overflowed {
        /// Mask of the counters.
        counters: u64,
        /// The overflow asks for an interrupt.
        interrupts: bool,
    },
    /// Counters have overflowed for event-based branches.
    Branched {
        /// Mask of the counters.
        counters: u64,
        /// Address of the handler, if the program goes on there. It does not while it has disabled branches, or in its
        /// kernel.
        handler: Option<u64>,
    },
    /// A notice for the operator. The journal has all notices, also those that are dropped because there are too many.
    Noticed(Notice),
}

/// The entries that were not taken yet; `None` while no entries are recorded.
#[derive(Debug, Default)]
pub(crate) struct Journal(Option<Vec<Entry>>);

impl Journal {
    /// Starts or stops recording entries.
    pub fn enable(&mut self, enabled: bool) {
        self.0 = enabled.then(|| self.0.take().unwrap_or_default());
    }

    /// Adds an entry, if entries are recorded.
    pub fn add(&mut self, entry: impl FnOnce() -> Entry) {
        if let Some(entries) = &mut self.0 {
            entries.push(entry());
        }
    }

    /// Takes the entries.
    pub fn take(&mut self) -> Vec<Entry> {
        self.0.as_mut().map(std::mem::take).unwrap_or_default()
    }
}
