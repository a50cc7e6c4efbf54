//! Changes of a policy while the guest runs.

use std::num::{NonZeroU32, NonZeroU64};

use serde::{Deserialize, Serialize};

use super::{Allowed, Freeze, OnStarvation, Policy};

/// A change of a policy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// The policy to which the settings are applied.
    pub from: Base,
    /// The settings, applied in order. Of several for the same field the last one counts.
    pub settings: Vec<Setting>,
}

/// The policy to which a [`Change`] applies its settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Base {
    /// The guest's present policy.
    Present,
    /// The default policy.
    Default,
}

/// A new value for one field of a [`Policy`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Setting {
    /// [`Policy::allowed`].
    Allowed(Allowed),
    /// [`Policy::min_period`].
    #[serde(rename = "least-period")]
    MinPeriod(NonZeroU64),
    /// [`Policy::max_interrupts_per_second`].
    #[serde(rename = "most-interrupts")]
    MaxInterruptsPerSecond(Option<NonZeroU32>),
    /// [`Policy::freeze`].
    Freeze(Freeze),
    /// [`Policy::on_starvation`].
    OnStarvation(OnStarvation),
    /// [`Policy::spare_counters`].
    SpareCounters(u32),
    /// [`Policy::ebb`].
    Ebb(bool),
    /// [`Policy::record`].
    Record(bool),
}

impl Policy {
    /// Returns the policy of a running guest after a change. The guest keeps the counters with which it has started.
    #[must_use]
    pub fn changed_by(&self, change: &Change) -> Self {
        let start = match change.from {
            Base::Present => self.clone(),
            Base::Default => Self::default(),
        };
        Self { spare_counters: self.spare_counters, ..change.settings.iter().fold(start, Self::with) }
    }

    /// Returns the policy with a new value for one field.
    #[must_use]
    pub fn with(mut self, setting: &Setting) -> Self {
        match setting {
            Setting::Allowed(allowed) => self.allowed.clone_from(allowed),
            Setting::MinPeriod(counts) => self.min_period = *counts,
            Setting::MaxInterruptsPerSecond(max) => self.max_interrupts_per_second = *max,
            Setting::Freeze(freeze) => self.freeze = *freeze,
            Setting::OnStarvation(starvation) => self.on_starvation = *starvation,
            Setting::SpareCounters(counters) => self.spare_counters = *counters,
            Setting::Ebb(available) => self.ebb = *available,
            Setting::Record(may) => self.record = *may,
        }
        self
    }
}
