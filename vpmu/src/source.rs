//! Who counts: for a guest on a host with a PMU the host's perf events; in unit tests a script.

pub mod script;

use std::time::Duration;

use crate::event::{Event, Selection};
use crate::policy::Policy;
use crate::report::BackingReport;

/// As far ahead as an alarm can be: hosts' counters have 48 bits, and Linux uses 47 of them at a time.
pub const FAR: u64 = 1 << 46;

/// What makes counters.
pub trait Source {
    /// One counter.
    type Backing: Backing;

    /// Starts to count, from now on and from zero, with its alarm in `distance` counts.
    fn start(&mut self, selection: Selection, distance: u64) -> Result<Self::Backing, Refusal>;

    /// Whether the host has such an event at all, even if others hold the hardware for it.
    fn can_count(&mut self, event: Event) -> bool;

    /// Monotonic time.
    fn now(&self) -> Duration;

    /// Returns whether an alarm may repeat by itself at this interval: hosts throttle events that interrupt too often.
    fn may_repeat(&mut self, now: Duration, interval: Duration) -> bool;

    /// Sets the policy. Returns which backings it applies to.
    fn set_policy(&mut self, policy: &Policy) -> PolicyEffect;

    /// How many system calls it has made.
    fn requests(&self) -> u64;
}

/// Which backings a new policy applies to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PolicyEffect {
    /// All of them, from now on.
    Immediate,
    /// Those that are started from now on.
    OnNewBackings,
}

/// A counter that only ever counts up, while its guest runs.
pub trait Backing {
    /// How much was counted since the start.
    fn count(&mut self) -> Count;

    /// Sets the counter's one alarm, for when it has counted `distance` more; any alarm before is off. When it is due, the
    /// vCPU's thread leaves the guest. It may be repeated until it is set anew.
    fn arm(&mut self, distance: u64) -> Result<(), Refusal>;

    /// How much of the count is an estimate of what was missed.
    fn estimated(&self) -> u64;

    /// Where it is, and for how long it has counted.
    fn report(&mut self) -> BackingReport;
}

/// What a counter has to show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Count {
    /// All there was to count.
    Exact(u64),
    /// All that was counted; there was more, because the counter was without hardware for a time.
    Starved(u64),
}

impl Count {
    /// What was counted.
    pub fn number(self) -> u64 {
        let (Self::Exact(count) | Self::Starved(count)) = self;
        count
    }
}

/// Why an event is not counted.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Refusal(pub String);
