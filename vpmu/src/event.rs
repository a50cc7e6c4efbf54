//! What a counter counts, and when: the words that models, bank and sources share.

use std::fmt;

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// What the host's own PMU calls it: the guest's encoding, passed through.
    Raw(u64),
}

/// The privilege levels at which the guest is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filter {
    /// Its programs only.
    User,
    /// Its kernel only.
    Kernel,
    /// Both.
    All,
}

/// A counter's configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Selection {
    /// What it counts.
    pub event: Event,
    /// At which privilege levels.
    pub filter: Filter,
}

impl fmt::Display for Selection {
    /// As `perf` has it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Event::Raw(code) = self.event;
        let filter = match self.filter {
            Filter::User => "u",
            Filter::Kernel => "k",
            Filter::All => "uk",
        };
        write!(f, "r{code:x}:{filter}")
    }
}
