//! The SBI's event indices: the event type in bits 19..16, and an event code of that type in bits 15..0.

use crate::event::{Cache, Event, GenericEvent};

/// Meanings of the general hardware events (type 0). The first one has code 1.
const GENERAL: [GenericEvent; 10] = [
    GenericEvent::Cycles,
    GenericEvent::Instructions,
    GenericEvent::CacheReferences,
    GenericEvent::CacheMisses,
    GenericEvent::Branches,
    GenericEvent::BranchMisses,
    GenericEvent::BusCycles,
    GenericEvent::StalledFrontend,
    GenericEvent::StalledBackend,
    GenericEvent::ReferenceCycles,
];

/// Returns the event of an event index and its event data. Returns `None` for an unknown index and for firmware events
/// (type 15), which have no counters.
pub fn decode(index: u64, data: u64) -> Option<Event> {
    /// The bits of `mhpmevent` that the guest selects by a raw event (type 2).
    const ENCODING: u64 = (1 << 48) - 1;
    /// The bits of `mhpmevent` that the guest selects by a raw event of version 2 (type 3).
    const ENCODING_V2: u64 = (1 << 56) - 1;
    let code = index & 0xffff;
    match index >> 16 {
        0 => {
            let number = usize::try_from(code.checked_sub(1)?).ok()?;
            GENERAL.get(number).copied().map(Event::Generic)
        }
        1 => Cache::numbered(code >> 3, code >> 1 & 3, code & 1).map(GenericEvent::Cache).map(Event::Generic),
        2 if code == 0 => Some(Event::Raw(data & ENCODING)),
        3 if code == 0 => Some(Event::Raw(data & ENCODING_V2)),
        _ => None,
    }
}

/// Returns the denied form of an event, for a notice: with its encoding, or its event index and name.
pub fn denied(event: Event) -> Event {
    match event {
        Event::Raw(code) => Event::Denied { code, name: None },
        Event::Generic(generic) => Event::Denied { code: index(generic), name: Some(generic.name()) },
        Event::Absent { .. } | Event::Denied { .. } => event,
    }
}

fn index(generic: GenericEvent) -> u64 {
    if let GenericEvent::Cache(cache) = generic {
        let [unit, operation, result] = cache.numbers();
        return 1 << 16 | unit << 3 | operation << 1 | result;
    }
    // Index 0 is "no event".
    (1..).zip(GENERAL).find(|(_, general)| *general == generic).map_or(0, |(code, _)| code)
}

/// Returns the index and the data from which [`decode`] makes an event.
pub fn encode(event: Event) -> (u64, u64) {
    match event {
        Event::Generic(generic) => (index(generic), 0),
        Event::Raw(code) | Event::Absent { code, .. } | Event::Denied { code, .. } => (3 << 16, code),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_is_what_the_specification_says() {
        let name = |index| match decode(index, 0)? {
            Event::Generic(generic) => Some(generic.name()),
            _ => None,
        };
        for (index, expected) in [
            (1, Some("cycles")),
            (2, Some("instructions")),
            (6, Some("branch-misses")),
            (10, Some("ref-cycles")),
            (0x1_0000, Some("L1-dcache-loads")),
            (0x1_0019, Some("dTLB-load-misses")),
            (0x1_0021, Some("iTLB-load-misses")),
            (0x1_0013, Some("LLC-store-misses")),
            (0x1_0035, Some("node-prefetch-misses")),
            // No event; no such code, cache operation or cache; other types.
            (0, None),
            (11, None),
            (0x1_0006, None),
            (0x1_0038, None),
            (0x4_0001, None),
            (0xf_0005, None),
            (0x10_0001, None),
            (u64::MAX, None),
        ] {
            assert_eq!(name(index), expected, "{index:#x}");
        }
    }

    #[test]
    fn a_denied_event_keeps_its_encoding_or_its_index_and_name() {
        for (index, data) in [(1, 0), (10, 0), (0x1_0019, 0), (0x2_0000, 0x1234)] {
            let event = decode(index, data).unwrap();
            let Event::Denied { code, name } = denied(event) else { panic!("{index:#x}") };
            assert_eq!(code, if data == 0 { index } else { data });
            assert_eq!(name.is_some(), data == 0);
        }
    }

    #[test]
    fn a_raw_event_has_only_the_bits_that_a_guest_may_select() {
        assert_eq!(decode(0x2_0000, u64::MAX), Some(Event::Raw(0xffff_ffff_ffff)));
        assert_eq!(decode(0x3_0000, u64::MAX), Some(Event::Raw(0xff_ffff_ffff_ffff)));
        assert_eq!([decode(0x2_0001, 5), decode(0x3_0001, 5)], [None, None]);
    }
}
