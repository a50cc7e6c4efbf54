//! What a guest gets for what it encodes: the host's event that means the same, unless the policy denies it.

use crate::event::{Event, Filter, Meaning, Scope, Selection};
use crate::policy::Policy;
use crate::translation::{self, Translation};
use crate::x86::Vendor;

/// On which terms a guest's counters count.
pub struct Terms {
    translation: Translation,
    policy: Policy,
}

impl Terms {
    /// Those of a guest with the PMU of one vendor on a host with that of another.
    pub fn new(guest: Vendor, host: Vendor, policy: Policy) -> Self {
        Self { translation: Translation { guest, host }, policy }
    }

    /// From now on this is the policy.
    pub fn obey(&mut self, policy: &Policy) {
        self.policy = policy.clone();
    }

    /// In which words the guest is talked about.
    pub fn translation(&self) -> Translation {
        self.translation
    }

    /// What is counted for an encoding of the guest's, which is all that selects the event, and nothing else.
    pub fn selection(&self, code: u64, filter: Filter) -> Selection {
        self.unless_denied(code, filter, || self.translation.event(code))
    }

    /// What is counted for a counter of the guest's that has a fixed event.
    pub fn fixed(&self, meaning: Meaning, filter: Filter) -> Selection {
        match translation::encoding(self.translation.guest, meaning) {
            Some(code) => self.unless_denied(code, filter, || Event::Meaning(meaning)),
            None => Selection { event: Event::Meaning(meaning), filter, scope: Scope::Guest },
        }
    }

    fn unless_denied(&self, code: u64, filter: Filter, event: impl FnOnce() -> Event) -> Selection {
        let vendor = self.translation.guest;
        let event = if self.policy.allows(vendor, code) {
            event()
        } else {
            Event::Denied { code, name: translation::name(vendor, code) }
        };
        Selection { event, filter, scope: self.policy.scope(vendor, code) }
    }
}
