//! Policies for a guest that selects most events as generic events, as RISC-V's SBI does, and the others by the host's
//! encoding.

use super::{Allowed, Freeze, Policy, Rule, Tier};
use crate::event::{CacheUnit, Event, GenericEvent, Scope};
use crate::translation::PLAIN;

impl Policy {
    /// Returns whether the guest may count an event.
    pub fn allows_event(&self, event: Event) -> bool {
        match &self.allowed {
            Allowed::Tier(tier) => Tier::of_event(event) <= *tier,
            Allowed::These(rules) => rules.iter().any(|rule| rule.matches_event(event)),
        }
    }

    /// Returns when an event is counted.
    pub fn scope_of_event(&self, event: Event) -> Scope {
        match self.freeze {
            Freeze::Host => Scope::Thread,
            Freeze::Hybrid if is_time(event) => Scope::Thread,
            Freeze::Hybrid | Freeze::Guest => Scope::Guest,
        }
    }
}

impl Tier {
    /// Returns the lowest tier that has an event. The vendor defines what an encoding counts, so encodings are in the
    /// highest tier.
    pub fn of_event(event: Event) -> Self {
        let Event::Generic(generic) = event else { return Self::Enhanced };
        match generic {
            GenericEvent::Cycles
            | GenericEvent::ReferenceCycles
            | GenericEvent::BusCycles
            | GenericEvent::Instructions
            | GenericEvent::Branches
            | GenericEvent::BranchMisses => Self::Architectural,
            GenericEvent::StalledFrontend | GenericEvent::StalledBackend => Self::Standard,
            GenericEvent::CacheReferences | GenericEvent::CacheMisses => Self::Enhanced,
            GenericEvent::Cache(cache) => match cache.unit {
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
    fn matches_event(&self, event: Event) -> bool {
        match (self, event) {
            (Self::Named(name), Event::Generic(generic)) => {
                generic.name() == *name || generic.other_name() == Some(name)
            }
            // A rule without a mask has x86's mask. On RISC-V all bits of an encoding may select the event.
            (Self::Raw { mask: PLAIN, value }, Event::Raw(code)) => code == *value,
            (Self::Raw { mask, value }, Event::Raw(code)) => code & mask == *value,
            _ => false,
        }
    }
}

fn is_time(event: Event) -> bool {
    use GenericEvent::{BusCycles, Cycles, ReferenceCycles};
    matches!(event, Event::Generic(Cycles | ReferenceCycles | BusCycles))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Cache;
    use crate::policy::rule;

    /// All events with a name.
    fn events() -> Vec<Event> {
        use GenericEvent::{
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
        let caches =
            (0..42).filter_map(|n| Cache::numbered(n / 6, n / 2 % 3, n % 2)).map(GenericEvent::Cache);
        general.into_iter().chain(caches).map(Event::Generic).collect()
    }

    #[test]
    fn every_name_that_a_rule_can_have_is_one_event() {
        for name in rule::names() {
            let matching = events().into_iter().filter(|event| Rule::Named(name).matches_event(*event));
            assert_eq!(matching.count(), 1, "{name}");
        }
    }

    #[test]
    fn every_event_can_be_allowed_by_its_name_and_an_encoding_by_its_bits() {
        for event in events() {
            let Event::Generic(generic) = event else { panic!("it has a name") };
            let rule: Rule = generic.name().parse().unwrap();
            assert!(rule.matches_event(event) && !rule.matches_event(Event::Raw(1)), "{rule}");
        }
        let rule: Rule = "r00c0/00ff".parse().unwrap();
        assert!(rule.matches_event(Event::Raw(0x55c0)) && !rule.matches_event(Event::Raw(0xc1)));
        assert!(!rule.matches_event(Event::Generic(GenericEvent::Cycles)));
        let rule: Rule = "r55".parse().unwrap();
        assert!(rule.matches_event(Event::Raw(0x55)) && !rule.matches_event(Event::Raw(0x1_0055)));
    }
}
