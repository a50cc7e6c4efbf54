//! Sources of counts: perf events on a real host (crate `vpmu-perf`), a script in unit tests.

pub mod script;

use std::time::Duration;

use crate::event::{Event, Selection};
use crate::policy::Policy;
use crate::report::BackingReport;

/// Greatest distance of an alarm. The host's counters have 48 bits, and Linux uses 47 of them for a period.
pub const FAR: u64 = 1 << 46;

/// Counts events for the counters of one vCPU.
pub trait Source {
    /// An event that is being counted.
    type Backing: Backing;

    /// Starts to count a selection from zero, with an alarm after `distance` counts.
    fn start(&mut self, selection: Selection, distance: u64) -> Result<Self::Backing, Refusal>;

    /// Stops to count a selection. A source may keep the backing for the next start of this selection, as long as it
    /// takes no hardware meanwhile.
    fn stop(&mut self, _selection: Selection, backing: Self::Backing) {
        drop(backing);
    }

    /// Closes what [`Self::stop`] has kept since before the last call of this.
    fn release_idle(&mut self) {}

    /// Returns whether the host has the event, even if others hold the hardware for it.
    fn can_count(&mut self, event: Event) -> bool;

    /// Returns how many hardware counters of the host an event takes at once.
    fn hardware_counters(&self, _event: Event) -> usize {
        1
    }

    /// Returns monotonic time.
    fn now(&self) -> Duration;

    /// Returns how long alarms that are left to repeat have to be apart on average, which is twice what the host's
    /// limit asks for: hosts throttle events that interrupt too often.
    fn least_interval(&mut self, now: Duration) -> Duration;

    /// Sets the policy. Returns which backings it applies to.
    fn set_policy(&mut self, policy: &Policy) -> PolicyEffect;

    /// Returns the number of system calls made so far.
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

/// A running event of a [`Source`]. Its count only increases.
pub trait Backing {
    /// Returns the count since the start.
    fn count(&mut self) -> Count;

    /// Sets the alarm to expire after `distance` more counts, instead of the alarm before. When an alarm expires, the
    /// vCPU's thread leaves the guest. The alarm may then repeat with the same distance, until it is set again.
    fn arm(&mut self, distance: u64) -> Result<(), Refusal>;

    /// Returns whether the alarm has expired since the last call, if that may be sooner than at the count for which it
    /// was set: the host counts something that is not the guest's, and that is left out of the count.
    fn takes_early_expiry(&mut self) -> bool {
        false
    }

    /// Returns how much of the count is an estimate of what was missed without hardware.
    fn estimated(&self) -> u64;

    /// Returns where the event is, as far as that is known without a request to the host.
    fn place(&self) -> Place {
        Place::Unknown
    }

    /// Returns the hardware counter that the event is on, and its enabled and running times.
    fn report(&mut self) -> BackingReport;
}

/// Where a [`Backing`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// On the host's hardware counter of this number.
    Counter(u32),
    /// Without hardware.
    Nowhere,
    /// Nobody knows without a request to the host.
    Unknown,
}

/// The count of a [`Backing`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Count {
    /// Everything was counted.
    Exact(u64),
    /// The event is without hardware, or was since the last read, and has missed counts. With a policy that scales, the
    /// number includes an estimate of what was missed.
    Starved(u64),
}

impl Count {
    /// Changes the number.
    #[must_use]
    pub fn map(self, change: impl FnOnce(u64) -> u64) -> Self {
        match self {
            Self::Exact(count) => Self::Exact(change(count)),
            Self::Starved(count) => Self::Starved(change(count)),
        }
    }

    /// Returns the number, exact or not.
    pub fn number(self) -> u64 {
        let (Self::Exact(count) | Self::Starved(count)) = self;
        count
    }
}

/// The host's reason for not counting an event.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Refusal(pub String);
