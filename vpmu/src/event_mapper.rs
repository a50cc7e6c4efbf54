//! Maps a guest's event encodings to what the host counts: the event of the same meaning, unless the policy denies it.

use crate::event::{Event, Filter, GenericEvent, Scope, Selection};
use crate::policy::Policy;
use crate::translation::{self, Translation};
use crate::x86::Vendor;

/// Maps the encodings of one guest.
pub struct EventMapper {
    translation: Translation,
    policy: Policy,
}

impl EventMapper {
    /// Creates a mapper for a guest that sees the PMU of vendor `guest`, on a host of vendor `host`.
    pub fn new(guest: Vendor, host: Vendor, policy: Policy) -> Self {
        Self { translation: Translation { guest, host }, policy }
    }

    /// Sets the policy.
    pub fn set_policy(&mut self, policy: &Policy) {
        self.policy = policy.clone();
    }

    /// Returns the translation between the vendors of guest and host.
    pub fn translation(&self) -> Translation {
        self.translation
    }

    /// Returns what the host counts for an encoding. `code` holds the bits that select the event, and no others.
    pub fn selection(&self, code: u64, filter: Filter) -> Selection {
        self.unless_denied(code, filter, || self.translation.event(code))
    }

    /// Returns what the host counts for a fixed counter.
    pub fn fixed(&self, generic: GenericEvent, filter: Filter) -> Selection {
        match translation::encoding(self.translation.guest, generic) {
            Some(code) => self.unless_denied(code, filter, || Event::Generic(generic)),
            None => Selection { event: Event::Generic(generic), filter, scope: Scope::Guest },
        }
    }

    /// Returns what the host counts for an event with the flag of event-based branches, whose encoding without the flag
    /// is `code` and counts `selection`.
    #[cold]
    pub fn flagged(&self, code: u64, selection: Selection) -> Selection {
        let denied = Event::Denied { code, name: Some("event-based branches") };
        let event = if self.policy.ebb { selection.event } else { denied };
        Selection { event, scope: Scope::Guest, ..selection }
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
