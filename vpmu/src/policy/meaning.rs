//! What a policy says of a guest whose PMU names most events by their meaning, as RISC-V's firmware does, and has encodings
//! for the others.

use super::{Allowed, Freeze, Policy, Rule, Tier};
use crate::event::{CacheUnit, Event, Meaning, Scope};
use crate::translation::PLAIN;

impl Policy {
    /// Whether it may count this.
    pub fn allows_event(&self, event: Event) -> bool {
        match &self.allowed {
            Allowed::Tier(tier) => Tier::of_event(event) <= *tier,
            Allowed::These(rules) => rules.iter().any(|rule| rule.is_about_event(event)),
        }
    }

    /// When that is counted.
    pub fn scope_of_event(&self, event: Event) -> Scope {
        match self.freeze {
            Freeze::Host => Scope::Thread,
            Freeze::Hybrid if is_time(event) => Scope::Thread,
            Freeze::Hybrid | Freeze::Guest => Scope::Guest,
        }
    }
}

impl Tier {
    /// The least one that has this event. What an encoding sees is up to its maker, and so taken to be anything.
    pub fn of_event(event: Event) -> Self {
        let Event::Meaning(meaning) = event else { return Self::Enhanced };
        match meaning {
            Meaning::Cycles
            | Meaning::ReferenceCycles
            | Meaning::BusCycles
            | Meaning::Instructions
            | Meaning::Branches
            | Meaning::BranchMisses => Self::Architectural,
            Meaning::StalledFrontend | Meaning::StalledBackend => Self::Standard,
            Meaning::CacheReferences | Meaning::CacheMisses => Self::Enhanced,
            Meaning::Cache(cache) => match cache.unit {
                CacheUnit::L1d
                | CacheUnit::L1i
                | CacheUnit::DataTlb
                | CacheUnit::InstructionTlb
                | CacheUnit::Branch => Self::Standard,
                CacheUnit::LastLevel | CacheUnit::Node => Self::Enhanced,
            },
        }
    }
}

impl Rule {
    fn is_about_event(&self, event: Event) -> bool {
        match (self, event) {
            (Self::Named(name), Event::Meaning(meaning)) => {
                meaning.name() == *name || meaning.other_name() == Some(name)
            }
            // Without a mask of its own: all of these encodings may be what selects the event.
            (Self::Raw { mask: PLAIN, value }, Event::Raw(code)) => code == *value,
            (Self::Raw { mask, value }, Event::Raw(code)) => code & mask == *value,
            _ => false,
        }
    }
}

fn is_time(event: Event) -> bool {
    use Meaning::{BusCycles, Cycles, ReferenceCycles};
    matches!(event, Event::Meaning(Cycles | ReferenceCycles | BusCycles))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Cache;
    use crate::policy::rule;

    /// All events with a name.
    fn events() -> Vec<Event> {
        use Meaning::{
            BranchMisses, Branches, BusCycles, CacheMisses, CacheReferences, Cycles, Instructions,
            ReferenceCycles, StalledBackend, StalledFrontend,
        };
        let general = [
            Cycles,
            ReferenceCycles,
            Instructions,
            Branches,
            BranchMisses,
            BusCycles,
            CacheReferences,
            CacheMisses,
            StalledFrontend,
            StalledBackend,
        ];
        let caches = (0..42).filter_map(|n| Cache::numbered(n / 6, n / 2 % 3, n % 2)).map(Meaning::Cache);
        general.into_iter().chain(caches).map(Event::Meaning).collect()
    }

    #[test]
    fn every_name_that_a_policy_can_have_is_one_event() {
        for name in rule::names() {
            let about = events().into_iter().filter(|event| Rule::Named(name).is_about_event(*event));
            assert_eq!(about.count(), 1, "{name}");
        }
    }

    #[test]
    fn every_event_can_be_allowed_by_its_name_and_an_encoding_by_its_bits() {
        for event in events() {
            let Event::Meaning(meaning) = event else { panic!("it has a name") };
            let rule: Rule = meaning.name().parse().unwrap();
            assert!(rule.is_about_event(event) && !rule.is_about_event(Event::Raw(1)), "{rule}");
        }
        let rule: Rule = "r00c0/00ff".parse().unwrap();
        assert!(rule.is_about_event(Event::Raw(0x55c0)) && !rule.is_about_event(Event::Raw(0xc1)));
        assert!(!rule.is_about_event(Event::Meaning(Meaning::Cycles)));
        let rule: Rule = "r55".parse().unwrap();
        assert!(rule.is_about_event(Event::Raw(0x55)) && !rule.is_about_event(Event::Raw(0x1_0055)));
    }
}
