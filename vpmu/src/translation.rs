//! Which event of the host a guest gets for an event of the other vendor's: one of the same meaning, or none.
//!
//! A guest with the PMU of its host's vendor gets the host's events as it names them. One with the other vendor's gets
//! those of `TABLE` that both have, and the host's kernel finds its processor's encoding. Whatever only one of them has
//! is refused, by name: a count of something similar would be a lie. What is left of similarity is that AMD's branches
//! include interrupts and exceptions, which Linux counts as branches all the same.

use crate::event::{Event, Meaning, Selection};
use crate::policy::Tier;
use crate::x86::Vendor;

/// An event that the manuals or Linux name.
struct Row {
    /// In words.
    name: &'static str,
    /// What `perf` calls it.
    perf: &'static [&'static str],
    /// How a guest with Intel's PMU selects it: unit mask and event.
    intel: &'static [u64],
    /// How a guest with AMD's PMU does: bits 11..8 of the event are bits 35..32 here.
    amd: &'static [u64],
    /// What it is on a host of the other vendor.
    meaning: Option<Meaning>,
    /// The least tier that has it.
    tier: Tier,
    /// What it is a measure of.
    measures: Measures,
}

/// What a count grows with.
#[derive(PartialEq, Eq)]
enum Measures {
    /// Time, while the core is not halted.
    Time,
    /// What the core does.
    Work,
}

use Measures::{Time, Work};
use Tier::{Architectural, Enhanced, Standard};

/// Intel's encodings are those of the architectural events (SDM volume 3, table 20-1), in their order. AMD's are those that
/// Linux has for families 0x17 to 0x1a (arch/x86/events/amd/core.c), which the PPRs explain.
#[rustfmt::skip]
const TABLE: [Row; 21] = [
    Row { name: "cycles",                              perf: &["cycles", "cpu-cycles"],                             intel: &[0x003c], amd: &[0x0076],         meaning: Some(Meaning::Cycles),          tier: Architectural, measures: Time },
    Row { name: "instructions",                        perf: &["instructions"],                                     intel: &[0x00c0], amd: &[0x00c0],         meaning: Some(Meaning::Instructions),    tier: Architectural, measures: Work },
    // At the rate of the bus or crystal; AMD has one at the rate of the time-stamp counter, as Intel's fixed counter 2.
    Row { name: "bus-cycles",                          perf: &["bus-cycles"],                                       intel: &[0x013c], amd: &[],               meaning: None,                           tier: Architectural, measures: Time },
    // Of the last level, which AMD's core counters do not see; theirs are of the second.
    Row { name: "LLC references",                      perf: &["cache-references"],                                 intel: &[0x4f2e], amd: &[],               meaning: None,                           tier: Enhanced,      measures: Work },
    Row { name: "LLC misses",                          perf: &["cache-misses"],                                     intel: &[0x412e], amd: &[],               meaning: None,                           tier: Enhanced,      measures: Work },
    Row { name: "branches",                            perf: &["branches", "branch-instructions", "branch-loads"],  intel: &[0x00c4], amd: &[0x00c2],         meaning: Some(Meaning::Branches),        tier: Architectural, measures: Work },
    Row { name: "branch-misses",                       perf: &["branch-misses", "branch-load-misses"],              intel: &[0x00c5], amd: &[0x00c3],         meaning: Some(Meaning::BranchMisses),    tier: Architectural, measures: Work },
    // Intel's have a fixed counter; this is Linux's number for it, which it uses without one, too.
    Row { name: "ref-cycles",                          perf: &["ref-cycles"],                                       intel: &[0x0300], amd: &[0x1_0000_0120],  meaning: Some(Meaning::ReferenceCycles), tier: Architectural, measures: Time },
    Row { name: "cache-references (of the L2 cache)",  perf: &["cache-references"],                                 intel: &[],       amd: &[0xff60],         meaning: None,                           tier: Standard,      measures: Work },
    Row { name: "cache-misses (of the L2 cache)",      perf: &["cache-misses"],                                     intel: &[],       amd: &[0x0964],         meaning: None,                           tier: Standard,      measures: Work },
    Row { name: "stalled-cycles-frontend",             perf: &["stalled-cycles-frontend", "idle-cycles-frontend"],  intel: &[],       amd: &[0x0287, 0x00a9], meaning: None,                           tier: Standard,      measures: Work },
    Row { name: "stalled-cycles-backend",              perf: &["stalled-cycles-backend", "idle-cycles-backend"],    intel: &[],       amd: &[0x0187],         meaning: None,                           tier: Standard,      measures: Work },
    // Intel counts load instructions here, AMD accesses.
    Row { name: "L1-dcache-loads",                     perf: &["L1-dcache-loads"],                                  intel: &[],       amd: &[0x0040, 0xff29], meaning: None,                           tier: Standard,      measures: Work },
    Row { name: "L1-dcache-load-misses",               perf: &["L1-dcache-load-misses"],                            intel: &[],       amd: &[0xc860, 0xe860], meaning: None,                           tier: Standard,      measures: Work },
    Row { name: "L1-dcache-prefetches",                perf: &["L1-dcache-prefetches"],                             intel: &[],       amd: &[0xff5a],         meaning: None,                           tier: Enhanced,      measures: Work },
    Row { name: "L1-icache-loads",                     perf: &["L1-icache-loads"],                                  intel: &[],       amd: &[0x0080],         meaning: None,                           tier: Standard,      measures: Work },
    Row { name: "L1-icache-load-misses",               perf: &["L1-icache-load-misses"],                            intel: &[],       amd: &[0x0081],         meaning: None,                           tier: Standard,      measures: Work },
    Row { name: "dTLB-loads",                          perf: &["dTLB-loads"],                                       intel: &[],       amd: &[0xff45],         meaning: None,                           tier: Standard,      measures: Work },
    Row { name: "dTLB-load-misses",                    perf: &["dTLB-load-misses"],                                 intel: &[],       amd: &[0xf045],         meaning: None,                           tier: Standard,      measures: Work },
    Row { name: "iTLB-loads",                          perf: &["iTLB-loads"],                                       intel: &[],       amd: &[0x0084, 0xff84], meaning: None,                           tier: Standard,      measures: Work },
    Row { name: "iTLB-load-misses",                    perf: &["iTLB-load-misses"],                                 intel: &[],       amd: &[0xff85],         meaning: None,                           tier: Standard,      measures: Work },
];

/// What of an encoding is the event and its unit mask; what is left counts cycles with so many, or edges.
pub const PLAIN: u64 = 0xf_0000_ffff;

/// What `perf` calls the events here, each name once.
pub fn names() -> impl Iterator<Item = &'static str> {
    let all = || TABLE.iter().flat_map(|row| row.perf);
    all()
        .enumerate()
        .filter(move |(at, name)| !all().take(*at).any(|before| before == *name))
        .map(|(_, name)| *name)
}

/// Whether a vendor's PMU has an event that `perf` calls so.
pub fn has_name(name: &str, vendor: Vendor) -> bool {
    TABLE.iter().any(|row| row.perf.contains(&name) && !row.of(vendor).is_empty())
}

/// Whether `perf` calls it so, with or without a threshold, what a vendor's PMU encodes like that.
pub fn is_named(name: &str, vendor: Vendor, code: u64) -> bool {
    TABLE.iter().any(|row| row.perf.contains(&name) && row.has(vendor, code))
}

/// What `perf` calls it, if it has a name.
pub fn name(vendor: Vendor, code: u64) -> Option<&'static str> {
    row(vendor, code)?.perf.first().copied()
}

/// The least tier that has it, if it is one of these events.
pub fn tier(vendor: Vendor, code: u64) -> Option<Tier> {
    row(vendor, code).map(|row| row.tier)
}

/// Whether it measures time.
pub fn is_time(vendor: Vendor, code: u64) -> bool {
    row(vendor, code).is_some_and(|row| row.measures == Time)
}

/// How a vendor's PMU encodes this.
pub fn encoding(vendor: Vendor, meaning: Meaning) -> Option<u64> {
    TABLE.iter().find(|row| row.meaning == Some(meaning))?.of(vendor).first().copied()
}

fn row(vendor: Vendor, code: u64) -> Option<&'static Row> {
    TABLE.iter().find(|row| row.has(vendor, code))
}

/// The guest's language and the host's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Translation {
    /// Whose PMU the guest has.
    pub guest: Vendor,
    /// Whose the host has.
    pub host: Vendor,
}

impl Translation {
    /// The host's event for a guest's encoding, which is all that selects it, and nothing else.
    pub fn event(self, code: u64) -> Event {
        if self.guest == self.host {
            return Event::Raw(code);
        }
        match row(self.guest, code) {
            Some(Row { meaning: Some(meaning), .. }) if code & !PLAIN == 0 => Event::Meaning(*meaning),
            Some(Row { name, meaning: None, .. }) => Event::Absent { code, name },
            Some(_) => Event::Absent { code, name: "with a threshold or by edges" },
            None => Event::Absent { code, name: "an event of the guest's vendor only" },
        }
    }

    /// A selection as the guest's `perf` names it: by name if it is one of the table's, or else by number.
    pub fn words(self, selection: Selection) -> String {
        let words = selection.to_string();
        let Event::Raw(code) = selection.event else { return words };
        let named = TABLE.iter().find(|row| row.of(self.guest).contains(&code));
        match (named, words.split_once(':')) {
            (Some(Row { name, .. }), Some((_, filter))) => format!("{name}:{filter}"),
            _ => words,
        }
    }
}

impl Row {
    fn has(&self, vendor: Vendor, code: u64) -> bool {
        self.of(vendor).contains(&(code & PLAIN))
    }

    fn of(&self, vendor: Vendor) -> &'static [u64] {
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
    fn an_event_that_both_have_is_found_by_its_meaning() {
        for (intel, amd, meaning) in [
            (0x003c, 0x0076, Meaning::Cycles),
            (0x00c0, 0x00c0, Meaning::Instructions),
            (0x00c4, 0x00c2, Meaning::Branches),
            (0x00c5, 0x00c3, Meaning::BranchMisses),
        ] {
            assert_eq!(INTEL_ON_AMD.event(intel), Event::Meaning(meaning));
            assert_eq!(AMD_ON_INTEL.event(amd), Event::Meaning(meaning));
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
    fn at_home_every_encoding_is_passed_through() {
        for vendor in [Vendor::Amd, Vendor::Intel] {
            let home = Translation { guest: vendor, host: vendor };
            for code in [0x003c, 0x0076, 0x4f2e, 0x0187, 0x0184_00c2] {
                assert_eq!(home.event(code), Event::Raw(code));
            }
        }
    }

    #[test]
    fn no_encoding_means_two_things() {
        for vendor in [Vendor::Amd, Vendor::Intel] {
            let mut codes: Vec<_> = TABLE.iter().flat_map(|row| row.of(vendor)).collect();
            let all = codes.len();
            codes.sort_unstable();
            codes.dedup();
            assert_eq!(codes.len(), all, "{vendor:?}");
        }
    }

    #[test]
    fn a_name_of_perfs_is_one_event_of_a_vendors() {
        for vendor in [Vendor::Amd, Vendor::Intel] {
            for name in names() {
                let rows = TABLE.iter().filter(|row| row.perf.contains(&name) && !row.of(vendor).is_empty());
                assert!(rows.count() <= 1, "{name} of {vendor:?}");
            }
        }
        assert_eq!(names().filter(|name| *name == "cache-misses").count(), 1);
    }

    #[test]
    fn what_has_a_meaning_is_an_event_of_both() {
        for row in TABLE.iter().filter(|row| row.meaning.is_some()) {
            assert!(!row.intel.is_empty() && !row.amd.is_empty(), "{}", row.name);
        }
    }
}
