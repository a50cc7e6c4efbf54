//! The tiers of events that clouds sell.

use serde::{Deserialize, Serialize};

/// A set of events that clouds offer. Each tier includes the tiers before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Tier {
    /// The events that all processors of a vendor have, without those of the last-level cache.
    Architectural,
    /// The documented events of the core and of its private caches, which other cores do not affect.
    Standard,
    /// All events that the processor has.
    Enhanced,
}
