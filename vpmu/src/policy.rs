//! Policies: what the operator allows a guest to do with the host's counters.
//!
//! A policy does not affect registers. Whatever it denies, the guest's registers exist and keep what is written to
//! them; a denied event behaves as on a processor that does not have the event. A policy may change at any time.

mod change;
mod generic;
mod reach;
mod rule;
mod suggestion;

#[cfg(test)]
mod tests;

use std::num::{NonZeroU32, NonZeroU64};

use serde::{Deserialize, Serialize};

use crate::event::Scope;
use crate::translation;
use crate::x86::Vendor;

pub use crate::tier::Tier;
pub use change::{Base, Change, Setting};
pub use rule::{Name, Rule, UnknownEvent};
pub use suggestion::suggestion;

/// What a guest may do with the host's counters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// The events that may be counted.
    pub allowed: Allowed,
    /// Minimum number of counts between two interrupts of a counter.
    #[serde(rename = "least_period")]
    pub min_period: NonZeroU64,
    /// Maximum number of interrupts of a vCPU's counters in a second, if it is limited.
    #[serde(rename = "most_interrupts")]
    pub max_interrupts_per_second: Option<NonZeroU32>,
    /// When counters count.
    pub freeze: Freeze,
    /// What is done about a counter without hardware.
    pub on_starvation: OnStarvation,
    /// Number of the host's free counters that the guest is not offered when it starts.
    pub spare_counters: u32,
    /// Event-based branches are available ([`crate::ebb`]).
    #[serde(default = "available")]
    pub ebb: bool,
    /// The guest may be sampled from outside.
    #[serde(default = "available")]
    pub record: bool,
}

fn available() -> bool {
    true
}

/// The events that may be counted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Allowed {
    /// The events of this tier and of the tiers below it.
    Tier(Tier),
    /// The events that match at least one rule.
    These(Vec<Rule>),
}

/// When counters count, of the time that a vCPU's thread runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Freeze {
    /// Counters count while the thread runs the guest.
    #[default]
    Guest,
    /// Cycles also count while the thread works for the guest in the host. All other events count in the guest only.
    Hybrid,
    /// Counters always count.
    Host,
}

/// What is done about a counter that has lost its hardware and misses counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnStarvation {
    /// The operator is notified.
    #[default]
    Report,
    /// The missed counts are estimated from the counted ones, as perf scales, and the operator is notified.
    Scale,
    /// The machine stands still until the counter has hardware again.
    Stop,
}

impl Default for Policy {
    /// Returns the policy that allows all events, limits nothing, and counts in the guest only.
    fn default() -> Self {
        Self {
            allowed: Allowed::Tier(Tier::Enhanced),
            min_period: NonZeroU64::MIN,
            max_interrupts_per_second: None,
            freeze: Freeze::default(),
            on_starvation: OnStarvation::default(),
            spare_counters: 0,
            ebb: true,
            record: true,
        }
    }
}

impl Policy {
    /// Returns whether a guest that sees this vendor's PMU may count an encoding.
    pub fn allows(&self, vendor: Vendor, code: u64) -> bool {
        match &self.allowed {
            Allowed::Tier(tier) => Tier::of(vendor, code) <= *tier,
            Allowed::These(rules) => rules.iter().any(|rule| rule.matches(vendor, code)),
        }
    }

    /// Returns how many of the host's free counters a guest is offered that asks for no number: one at least.
    pub fn offered_counters(&self, free: usize) -> usize {
        free.saturating_sub(self.spare_counters as usize).max(free.min(1))
    }

    /// Returns when an encoding is counted.
    pub fn scope(&self, vendor: Vendor, code: u64) -> Scope {
        match self.freeze {
            Freeze::Host => Scope::Thread,
            Freeze::Hybrid if translation::is_time(vendor, code) => Scope::Thread,
            Freeze::Hybrid | Freeze::Guest => Scope::Guest,
        }
    }

    /// Returns the names in its rules of which this vendor's PMU has no event.
    pub fn unknown_event_names(&self, vendor: Vendor) -> impl Iterator<Item = Name> {
        let rules = match &self.allowed {
            Allowed::Tier(_) => &[],
            Allowed::These(rules) => rules.as_slice(),
        };
        rules.iter().filter_map(move |rule| rule.unknown_event_name(vendor))
    }
}

impl Tier {
    /// Returns the lowest tier that has an encoding of this vendor's PMU.
    pub fn of(vendor: Vendor, code: u64) -> Self {
        translation::tier(vendor, code).unwrap_or_else(|| reach::tier(vendor, code))
    }
}
