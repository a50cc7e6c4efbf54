//! What an operator lets a guest have of its host's counters.
//!
//! A policy says nothing of registers: whatever it denies, the guest's registers are there and keep what is written to them,
//! and a denied event behaves as on a processor that does not have it. It may change at any time.

mod change;
mod meaning;
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

pub use change::{Change, From, Setting};
pub use rule::{Name, Rule, UnknownEvent};
pub use suggestion::suggestion;

/// All of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// What may be counted.
    pub allowed: Allowed,
    /// There are at least so many counts between two interrupts of a counter.
    pub least_period: NonZeroU64,
    /// So many interrupts of its counters a vCPU gets in a second, if that is limited.
    pub most_interrupts: Option<NonZeroU32>,
    /// When counters count.
    pub freeze: Freeze,
    /// What is done about a counter that is without hardware.
    pub on_starvation: OnStarvation,
}

/// What may be counted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Allowed {
    /// What clouds sell under this name.
    Tier(Tier),
    /// What one of these says.
    These(Vec<Rule>),
}

/// What clouds sell: each has what those before it have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Tier {
    /// The events that all processors of a vendor have, without those of the last-level cache.
    Architectural,
    /// The documented events of the core and of its own caches: nothing that other cores have a part in.
    Standard,
    /// Whatever the processor has.
    Enhanced,
}

/// When counters count, of the time that a vCPU's thread runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Freeze {
    /// While it is in the guest.
    #[default]
    Guest,
    /// Cycles also while it works for the guest, everything else in the guest only.
    Hybrid,
    /// Always.
    Host,
}

/// What is done about a counter that is without hardware for a time, and misses counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnStarvation {
    /// The operator is told.
    #[default]
    Report,
    /// What was missed is estimated from what was counted, as perf does it, and the operator is told.
    Scale,
    /// The machine stands still until the counter has hardware again.
    Stop,
}

impl Default for Policy {
    /// All that the host has, and nothing but the guest.
    fn default() -> Self {
        Self {
            allowed: Allowed::Tier(Tier::Enhanced),
            least_period: NonZeroU64::MIN,
            most_interrupts: None,
            freeze: Freeze::default(),
            on_starvation: OnStarvation::default(),
        }
    }
}

impl Policy {
    /// Whether a guest with a PMU of this vendor's may count what it encodes so.
    pub fn allows(&self, vendor: Vendor, code: u64) -> bool {
        match &self.allowed {
            Allowed::Tier(tier) => Tier::of(vendor, code) <= *tier,
            Allowed::These(rules) => rules.iter().any(|rule| rule.is_about(vendor, code)),
        }
    }

    /// When that is counted.
    pub fn scope(&self, vendor: Vendor, code: u64) -> Scope {
        match self.freeze {
            Freeze::Host => Scope::Thread,
            Freeze::Hybrid if translation::is_time(vendor, code) => Scope::Thread,
            Freeze::Hybrid | Freeze::Guest => Scope::Guest,
        }
    }

    /// The events that it allows by a name that means nothing on a PMU of this vendor's.
    pub fn names_without_meaning(&self, vendor: Vendor) -> impl Iterator<Item = Name> {
        let rules = match &self.allowed {
            Allowed::Tier(_) => &[],
            Allowed::These(rules) => rules.as_slice(),
        };
        rules.iter().filter_map(move |rule| rule.name_without_meaning(vendor))
    }
}

impl Tier {
    /// The least one that has this event.
    pub fn of(vendor: Vendor, code: u64) -> Self {
        translation::tier(vendor, code).unwrap_or_else(|| reach::tier(vendor, code))
    }
}
