//! What is said about recording a VM: what is to be sampled, the samples, and the symbols of the guest's kernel.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tally_machine::{Function, Module, Sample};
use vpmu::event::{Event, Filter, GenericEvent};
use vpmu::policy::{Rule, UnknownEvent};
use vpmu_perf::Rate;

/// Size of the samples in one answer, in words, so that it is no longer than a line may be.
pub const MAX_WORDS: usize = 20_000;
/// Size of the part of the symbols in one answer.
pub const MAX_PART: usize = 256 << 10;
/// Maximum number of addresses whose functions are requested at once.
pub const MAX_ADDRESSES: usize = 256;

/// What is to be sampled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordOptions {
    /// The event, as `perf` names it.
    pub event: String,
    /// When a sample is taken.
    pub rate: SampleRate,
    /// Each sample has its callers.
    pub chains: bool,
}

/// When a sample is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SampleRate {
    /// Every time that the event has counted so much.
    Period(u64),
    /// About so often in a second.
    Frequency(u64),
}

impl SampleRate {
    /// Returns what perf is asked for.
    pub fn of_perf(self) -> Rate {
        match self {
            Self::Period(period) => Rate::Period(period),
            Self::Frequency(frequency) => Rate::Frequency(frequency),
        }
    }
}

/// An event that can be sampled, with the privilege levels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SampledEvent {
    /// As it was written.
    pub text: String,
    pub event: Event,
    pub filter: Filter,
}

/// A text is no event that can be sampled.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoEvent {
    #[error(transparent)]
    Unknown(#[from] UnknownEvent),
    #[error("`{0}` is a group of events: leave out what is behind `/`")]
    Group(String),
    #[error("unknown modifiers `{0}`: there are u (user mode), k (kernel) and uk")]
    Modifiers(String),
}

impl FromStr for SampledEvent {
    type Err = NoEvent;

    fn from_str(text: &str) -> Result<Self, NoEvent> {
        let (name, modifiers) = text.rsplit_once(':').unwrap_or((text, "uk"));
        let filter = match modifiers {
            "u" => Filter::User,
            "k" => Filter::Kernel,
            "uk" | "ku" => Filter::All,
            other => return Err(NoEvent::Modifiers(other.to_owned())),
        };
        let event = match name.parse()? {
            Rule::Raw { .. } if name.contains('/') => return Err(NoEvent::Group(name.to_owned())),
            Rule::Raw { value, .. } => Event::Raw(value),
            Rule::Named(known) => {
                let unknown = || UnknownEvent::Name { text: name.to_owned() };
                Event::Generic(GenericEvent::named(known).ok_or_else(unknown)?)
            }
        };
        Ok(Self { text: text.to_owned(), event, filter })
    }
}

/// A recording that has begun.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Begun {
    /// The event's `type` and `config`, by which the host's kernel knows it.
    pub kind: u32,
    pub config: u64,
    /// The functions of its kernel have names.
    pub has_functions: bool,
    /// What the samples say of processes.
    pub processes: Processes,
    /// The samples have callers in the kernel.
    pub has_kernel_chains: bool,
    /// Why a clock samples in place of the event.
    #[serde(default)]
    pub clock: Option<WhyClock>,
    /// Build id of the guest's kernel, if it was found.
    pub build_id: Option<[u8; 20]>,
}

/// What samples say of a guest's processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Processes {
    /// The address of the page tables.
    Unknown,
    /// Which one ran.
    Named,
    /// And which files it has mapped.
    Mapped,
}

/// Why a VM is sampled by a clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WhyClock {
    /// The host has no PMU.
    NoPmu,
    /// The guest's counters and others hold those of the host.
    NoCounter,
}

/// Samples since the last ones.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Samples {
    /// The samples, those of each vCPU in the order of their time.
    pub taken: Vec<Sample>,
    /// Number of samples that were lost.
    pub lost: u64,
    /// There are more.
    pub more: bool,
}

/// Functions of the guest's kernel and of its modules at some addresses. Those of other addresses have no names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Functions {
    pub found: Vec<Function>,
}

/// A part of the symbols of the guest's kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SymbolsPart {
    /// Lines as in `/proc/kallsyms`, the modules' behind the kernel's own. Empty if no symbols were found.
    pub text: String,
    /// The modules, in the first part.
    #[serde(default)]
    pub modules: Vec<Module>,
    /// There are more.
    pub more: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_named_as_for_perf() {
        let event = |text: &str| text.parse::<SampledEvent>().map(|event| (event.event, event.filter));
        assert_eq!(event("cycles"), Ok((Event::Generic(GenericEvent::Cycles), Filter::All)));
        assert_eq!(event("instructions:u"), Ok((Event::Generic(GenericEvent::Instructions), Filter::User)));
        assert_eq!(event("r00c0:k"), Ok((Event::Raw(0xc0), Filter::Kernel)));
        let said = |text| event(text).unwrap_err().to_string();
        assert!(said("cycle").contains("did you mean `cycles`?"));
        assert!(said("cycles:pp").contains("`pp`"));
        assert!(said("r00c0/00ff").contains("group"));
    }
}
