//! A change of a policy: what somebody has said of it, and what stays as it was.

use std::num::{NonZeroU32, NonZeroU64};

use serde::{Deserialize, Serialize};

use super::{Allowed, Freeze, OnStarvation, Policy};

/// What is to be different.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// From what.
    pub from: From,
    /// What is said, the last word of several on the same.
    pub settings: Vec<Setting>,
}

/// What is changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum From {
    /// The policy as it is.
    Present,
    /// What a policy is of which nothing is said.
    Default,
}

/// One thing that a policy says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Setting {
    /// What may be counted.
    Allowed(Allowed),
    /// The least number of counts between two interrupts of a counter.
    LeastPeriod(NonZeroU64),
    /// How many interrupts a vCPU gets in a second at most.
    MostInterrupts(Option<NonZeroU32>),
    /// When counters count.
    Freeze(Freeze),
    /// What is done about a counter without hardware.
    OnStarvation(OnStarvation),
}

impl Policy {
    /// What it is after a change.
    #[must_use]
    pub fn changed_by(&self, change: &Change) -> Self {
        let start = match change.from {
            From::Present => self.clone(),
            From::Default => Self::default(),
        };
        change.settings.iter().fold(start, Self::with)
    }

    /// What it is with one thing said.
    #[must_use]
    pub fn with(mut self, setting: &Setting) -> Self {
        match setting {
            Setting::Allowed(allowed) => self.allowed.clone_from(allowed),
            Setting::LeastPeriod(counts) => self.least_period = *counts,
            Setting::MostInterrupts(most) => self.most_interrupts = *most,
            Setting::Freeze(freeze) => self.freeze = *freeze,
            Setting::OnStarvation(starvation) => self.on_starvation = *starvation,
        }
        self
    }
}
