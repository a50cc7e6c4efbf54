//! Translates events between the encodings of AMD and Intel.
//!
//! A guest that sees its host's vendor's PMU has its encodings passed through, but for two that Intel's fixed counters
//! count as well: a general and a fixed counter with the same event share an event of the host. A guest that sees the
//! other vendor's PMU can count the events of `TABLE` that both vendors have; the host's kernel finds the encoding of
//! its processor. An event that only the guest's vendor has is refused by name, because a count of something similar
//! would be wrong. One difference remains: AMD's branches include interrupts and exceptions. Linux uses that event for
//! `branches` on AMD all the same.

use crate::event::{Event, GenericEvent, Selection};
use crate::tier::Tier;
use crate::x86::Vendor;

/// An event that the manuals or Linux name.
struct Row {
    /// Name or description for the operator.
    name: &'static str,
    /// The names that `perf` has for it.
    perf: &'static [&'static str],
    /// Intel's encodings: unit mask and event.
    intel: &'static [u64],
    /// AMD's encodings: unit mask and event. Bits 11..8 of the event are bits 35..32 here, as in the register.
    amd: &'static [u64],
    /// The event that a host of the other vendor counts for it, if both vendors have it.
    generic: Option<GenericEvent>,
    /// The lowest tier that has it.
    tier: Tier,
    /// What it measures.
    measures: Measures,
}

/// What an event measures.
#[derive(PartialEq, Eq)]
enum Measures {
    /// Time during which the core is not halted.
    Time,
    /// Something that the core does.
    Work,
}

use Measures::{Time, Work};
use Tier::{Architectural, Enhanced, Standard};

/// The events. Intel's encodings are those of the architectural events (SDM volume 3, table 20-1), in their order.
/// AMD's are those that Linux has for families 0x17 to 0x1a (arch/x86/events/amd/core.c); the PPRs describe them.
#[rustfmt::skip]
const TABLE: [Row; 21] = [
    Row { name: "cycles",                              perf: &["cycles", "cpu-cycles"],                             intel: &[0x003c], amd: &[0x0076],         generic: Some(GenericEvent::Cycles),          tier: Architectural, measures: Time },
    Row { name: "instructions",                        perf: &["instructions"],                                     intel: &[0x00c0], amd: &[0x00c0],         generic: Some(GenericEvent::Instructions),    tier: Architectural, measures: Work },
    // Counts at the rate of the bus or crystal clock. AMD's event counts at the rate of the TSC, as Intel's fixed
    // counter 2 does.
    Row { name: "bus-cycles",                          perf: &["bus-cycles"],                                       intel: &[0x013c], amd: &[],               generic: None,                                tier: Architectural, measures: Time },
    // AMD's core counters do not count last-level cache accesses. AMD's events of these names are about the L2 cache.
    Row { name: "LLC references",                      perf: &["cache-references"],                                 intel: &[0x4f2e], amd: &[],               generic: None,                                tier: Enhanced,      measures: Work },
    Row { name: "LLC misses",                          perf: &["cache-misses"],                                     intel: &[0x412e], amd: &[],               generic: None,                                tier: Enhanced,      measures: Work },
    Row { name: "branches",                            perf: &["branches", "branch-instructions", "branch-loads"],  intel: &[0x00c4], amd: &[0x00c2],         generic: Some(GenericEvent::Branches),        tier: Architectural, measures: Work },
    Row { name: "branch-misses",                       perf: &["branch-misses", "branch-load-misses"],              intel: &[0x00c5], amd: &[0x00c3],         generic: Some(GenericEvent::BranchMisses),    tier: Architectural, measures: Work },
    // Intel has a fixed counter for this event, and no encoding. 0x0300 is the encoding that Linux uses for the fixed
    // counter.
    Row { name: "ref-cycles",                          perf: &["ref-cycles"],                                       intel: &[0x0300], amd: &[0x1_0000_0120],  generic: Some(GenericEvent::ReferenceCycles), tier: Architectural, measures: Time },
    Row { name: "cache-references (of the L2 cache)",  perf: &["cache-references"],                                 intel: &[],       amd: &[0xff60],         generic: None,                                tier: Standard,      measures: Work },
    Row { name: "cache-misses (of the L2 cache)",      perf: &["cache-misses"],                                     intel: &[],       amd: &[0x0964],         generic: None,                                tier: Standard,      measures: Work },
    Row { name: "stalled-cycles-frontend",             perf: &["stalled-cycles-frontend", "idle-cycles-frontend"],  intel: &[],       amd: &[0x0287, 0x00a9], generic: None,                                tier: Standard,      measures: Work },
    Row { name: "stalled-cycles-backend",              perf: &["stalled-cycles-backend", "idle-cycles-backend"],    intel: &[],       amd: &[0x0187],         generic: None,                                tier: Standard,      measures: Work },
    // AMD counts accesses, Intel counts load instructions.
    Row { name: "L1-dcache-loads",                     perf: &["L1-dcache-loads"],                                  intel: &[],       amd: &[0x0040, 0xff29], generic: None,                                tier: Standard,      measures: Work },
    Row { name: "L1-dcache-load-misses",               perf: &["L1-dcache-load-misses"],                            intel: &[],       amd: &[0xc860, 0xe860], generic: None,                                tier: Standard,      measures: Work },
    Row { name: "L1-dcache-prefetches",                perf: &["L1-dcache-prefetches"],                             intel: &[],       amd: &[0xff5a],         generic: None,                                tier: Enhanced,      measures: Work },
    Row { name: "L1-icache-loads",                     perf: &["L1-icache-loads"],                                  intel: &[],       amd: &[0x0080],         generic: None,                                tier: Standard,      measures: Work },
    Row { name: "L1-icache-load-misses",               perf: &["L1-icache-load-misses"],                            intel: &[],       amd: &[0x0081],         generic: None,                                tier: Standard,      measures: Work },
    Row { name: "dTLB-loads",                          perf: &["dTLB-loads"],                                       intel: &[],       amd: &[0xff45],         generic: None,                                tier: Standard,      measures: Work },
    Row { name: "dTLB-load-misses",                    perf: &["dTLB-load-misses"],                                 intel: &[],       amd: &[0xf045],         generic: None,                                tier: Standard,      measures: Work },
    Row { name: "iTLB-loads",                          perf: &["iTLB-loads"],                                       intel: &[],       amd: &[0x0084, 0xff84], generic: None,                                tier: Standard,      measures: Work },
    Row { name: "iTLB-load-misses",                    perf: &["iTLB-load-misses"],                                 intel: &[],       amd: &[0xff85],         generic: None,                                tier: Standard,      measures: Work },
];

/// The bits of an encoding that are the event and its unit mask. The other bits are the counter mask, invert and edge.
pub const PLAIN: u64 = 0xf_0000_ffff;

/// Returns whether a processor of this vendor may have an event with this encoding, so that a guest's encoding can be
/// passed to the host's kernel as it is. Others could be encodings to which Linux itself gives a meaning.
/// - Intel's processors have no event 0. Linux uses its unit masks for the fixed counters, for a counter that virtual
///   machines reserve for branch records (`INTEL_FIXED_VLBR_EVENT`), and for topdown metrics.
/// - AMD's event 0xfff merges two counters, for which Linux takes a second one by itself.
///
/// Beside event and unit mask there are edge detection (bit 18), inversion (bit 23) and the counter mask (bits 31..24).
fn can_be_passed(vendor: Vendor, code: u64) -> bool {
    const MODIFIERS: u64 = 0xff84_0000;
    match vendor {
        Vendor::Intel => code & !(0xffff | MODIFIERS) == 0 && code & 0xff != 0,
        Vendor::Amd => code & !(PLAIN | MODIFIERS) == 0 && code & 0xf_0000_00ff != 0xf_0000_00ff,
    }
}

/// Intel's encodings of the events that fixed counters count as well. Linux has the same encodings for its generic
/// events on every Intel processor with architectural performance monitoring.
const INTELS_CYCLES: u64 = 0x003c;
const INTELS_INSTRUCTIONS: u64 = 0x00c0;

/// Returns the names that `perf` has for the events, each name once.
pub fn names() -> impl Iterator<Item = &'static str> {
    let all = || TABLE.iter().flat_map(|row| row.perf);
    all()
        .enumerate()
        .filter(move |(at, name)| !all().take(*at).any(|before| before == *name))
        .map(|(_, name)| *name)
}

/// Returns whether a vendor's PMU has an event with this name of `perf`.
pub fn has_name(name: &str, vendor: Vendor) -> bool {
    TABLE.iter().any(|row| row.perf.contains(&name) && !row.encodings(vendor).is_empty())
}

/// Returns whether `perf` has this name for the event that a vendor encodes as `code`, with or without a counter mask.
pub fn is_named(name: &str, vendor: Vendor, code: u64) -> bool {
    TABLE.iter().any(|row| row.perf.contains(&name) && row.has(vendor, code))
}

/// Returns the name that `perf` has for an encoding, if it has one.
pub fn name(vendor: Vendor, code: u64) -> Option<&'static str> {
    row(vendor, code)?.perf.first().copied()
}

/// Returns the lowest tier that has an encoding, if it is an event of the table.
pub fn tier(vendor: Vendor, code: u64) -> Option<Tier> {
    row(vendor, code).map(|row| row.tier)
}

/// Returns whether an encoding is an event that measures time: core, reference or bus cycles.
pub fn is_time(vendor: Vendor, code: u64) -> bool {
    row(vendor, code).is_some_and(|row| row.measures == Time)
}

/// Returns a vendor's encoding of a generic event, if both vendors have the event.
pub fn encoding(vendor: Vendor, generic: GenericEvent) -> Option<u64> {
    TABLE.iter().find(|row| row.generic == Some(generic))?.encodings(vendor).first().copied()
}

fn row(vendor: Vendor, code: u64) -> Option<&'static Row> {
    TABLE.iter().find(|row| row.has(vendor, code))
}

/// Translation from the encodings of one vendor to the events of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Translation {
    /// Vendor of the PMU that the guest sees.
    pub guest: Vendor,
    /// Vendor of the host's processor.
    pub host: Vendor,
}

impl Translation {
    /// Returns the host's event for a guest's encoding. `code` holds the bits that select the event, and no others.
    pub fn event(self, code: u64) -> Event {
        if self.guest == self.host && can_be_passed(self.host, code) {
            return match (self.host, code) {
                (Vendor::Intel, INTELS_CYCLES) => Event::Generic(GenericEvent::Cycles),
                (Vendor::Intel, INTELS_INSTRUCTIONS) => Event::Generic(GenericEvent::Instructions),
                _ => Event::Raw(code),
            };
        }
        match row(self.guest, code) {
            Some(Row { generic: Some(generic), .. }) if code & !PLAIN == 0 => Event::Generic(*generic),
            Some(Row { name, generic: None, .. }) => Event::Absent { code, name },
            Some(_) => Event::Absent { code, name: "with a threshold or by edges" },
            None if self.guest == self.host => Event::Absent { code, name: "no event of a processor" },
            None => Event::Absent { code, name: "an event of the guest's vendor only" },
        }
    }

    /// Formats a selection for the operator: with the event's name if it is in the table, or else with its encoding.
    pub fn describe(self, selection: Selection) -> String {
        let text = selection.to_string();
        let Event::Raw(code) = selection.event else { return text };
        let named = TABLE.iter().find(|row| row.encodings(self.guest).contains(&code));
        match (named, text.split_once(':')) {
            (Some(Row { name, .. }), Some((_, modifiers))) => format!("{name}:{modifiers}"),
            _ => text,
        }
    }
}

impl Row {
    fn has(&self, vendor: Vendor, code: u64) -> bool {
        self.encodings(vendor).contains(&(code & PLAIN))
    }

    fn encodings(&self, vendor: Vendor) -> &'static [u64] {
        match vendor {
            Vendor::Intel => self.intel,
            Vendor::Amd => self.amd,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTEL_ON_AMD: Translation = Translation { guest: Vendor::Intel, host: Vendor::Amd };
    const AMD_ON_INTEL: Translation = Translation { guest: Vendor::Amd, host: Vendor::Intel };

    #[test]
    fn an_event_of_both_vendors_is_translated_as_a_generic_event() {
        for (intel, amd, generic) in [
            (0x003c, 0x0076, GenericEvent::Cycles),
            (0x00c0, 0x00c0, GenericEvent::Instructions),
            (0x00c4, 0x00c2, GenericEvent::Branches),
            (0x00c5, 0x00c3, GenericEvent::BranchMisses),
        ] {
            assert_eq!(INTEL_ON_AMD.event(intel), Event::Generic(generic));
            assert_eq!(AMD_ON_INTEL.event(amd), Event::Generic(generic));
        }
    }

    #[test]
    fn an_event_that_the_host_lacks_is_refused_by_name() {
        let absent = |event| match event {
            Event::Absent { name, .. } => name,
            other => panic!("{other:?}"),
        };
        assert_eq!(absent(INTEL_ON_AMD.event(0x4f2e)), "LLC references");
        assert_eq!(absent(AMD_ON_INTEL.event(0x0187)), "stalled-cycles-backend");
        assert_eq!(absent(INTEL_ON_AMD.event(0x01d1)), "an event of the guest's vendor only");
        assert_eq!(absent(INTEL_ON_AMD.event(0x0100_00c4)), "with a threshold or by edges");
    }

    #[test]
    fn on_a_host_of_the_same_vendor_encodings_are_passed_through() {
        for vendor in [Vendor::Amd, Vendor::Intel] {
            let same = Translation { guest: vendor, host: vendor };
            for code in [0x0076, 0x4f2e, 0x0187, 0x0184_00c2, 0x0100_00c0, 0x0100_003c] {
                assert_eq!(same.event(code), Event::Raw(code));
            }
        }
    }

    #[test]
    fn an_event_of_intels_fixed_counters_is_the_same_event_in_a_general_counter() {
        let intel = Translation { guest: Vendor::Intel, host: Vendor::Intel };
        assert_eq!(intel.event(0x003c), Event::Generic(GenericEvent::Cycles));
        assert_eq!(intel.event(0x00c0), Event::Generic(GenericEvent::Instructions));
        let amd = Translation { guest: Vendor::Amd, host: Vendor::Amd };
        assert_eq!([amd.event(0x00c0), amd.event(0x0076)], [Event::Raw(0x00c0), Event::Raw(0x0076)]);
    }

    #[test]
    fn encodings_to_which_linux_gives_a_meaning_of_its_own_are_not_passed_through() {
        let intel = Translation { guest: Vendor::Intel, host: Vendor::Intel };
        let is_absent = |event| matches!(event, Event::Absent { .. });
        for code in [0x0000, 0x0100, 0x0400, 0x1b00, 0x8000, 0x0400_0000, 1 << 32 | 0xc0, 1 << 21 | 0xc0] {
            assert!(is_absent(intel.event(code)), "{code:#x}");
        }
        assert_eq!(intel.event(0x0300), Event::Generic(GenericEvent::ReferenceCycles));
        let amd = Translation { guest: Vendor::Amd, host: Vendor::Amd };
        for code in [0xf_0000_00ff, 0xf_0000_04ff, 1 << 36 | 0xc0, 1 << 40 | 0xc0] {
            assert!(is_absent(amd.event(code)), "{code:#x}");
        }
        assert_eq!(amd.event(0x0000), Event::Raw(0), "FPU pipe assignment");
    }

    #[test]
    fn no_encoding_is_in_the_table_twice() {
        for vendor in [Vendor::Amd, Vendor::Intel] {
            let mut codes: Vec<_> = TABLE.iter().flat_map(|row| row.encodings(vendor)).collect();
            let all = codes.len();
            codes.sort_unstable();
            codes.dedup();
            assert_eq!(codes.len(), all, "{vendor:?}");
        }
    }

    #[test]
    fn a_name_of_perf_is_at_most_one_event_of_a_vendor() {
        for vendor in [Vendor::Amd, Vendor::Intel] {
            for name in names() {
                let rows =
                    TABLE.iter().filter(|row| row.perf.contains(&name) && !row.encodings(vendor).is_empty());
                assert!(rows.count() <= 1, "{name} of {vendor:?}");
            }
        }
        assert_eq!(names().filter(|name| *name == "cache-misses").count(), 1);
    }

    #[test]
    fn a_generic_event_is_an_event_of_both_vendors() {
        for row in TABLE.iter().filter(|row| row.generic.is_some()) {
            assert!(!row.intel.is_empty() && !row.amd.is_empty(), "{}", row.name);
        }
    }
}
