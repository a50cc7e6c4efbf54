//! Which event of the host a guest gets for an event of the other vendor's: one of the same meaning, or none.
//!
//! A guest with the PMU of its host's vendor gets the host's events as it names them. One with the other vendor's gets
//! those of [`TABLE`] that both have, and the host's kernel finds its processor's encoding. Whatever only one of them has
//! is refused, by name: a count of something similar would be a lie. What is left of similarity is that AMD's branches
//! include interrupts and exceptions, which Linux counts as branches all the same.

use crate::event::{Event, Meaning};
use crate::x86::Vendor;

/// An event that the manuals or Linux name.
struct Row {
    /// What `perf` calls it, or else the manual.
    name: &'static str,
    /// How a guest with Intel's PMU selects it: unit mask and event.
    intel: &'static [u64],
    /// How a guest with AMD's PMU does: bits 11..8 of the event are bits 35..32 here.
    amd: &'static [u64],
    /// What it is on a host of the other vendor.
    meaning: Option<Meaning>,
}

/// Intel's encodings are those of the architectural events (SDM volume 3, table 20-1), in their order. AMD's are those that
/// Linux has for families 0x17 to 0x1a (arch/x86/events/amd/core.c), which the PPRs explain.
#[rustfmt::skip]
const TABLE: [Row; 19] = [
    Row { name: "cycles",         intel: &[0x003c], amd: &[0x0076],        meaning: Some(Meaning::Cycles) },
    Row { name: "instructions",   intel: &[0x00c0], amd: &[0x00c0],        meaning: Some(Meaning::Instructions) },
    // At the rate of the bus or crystal; AMD has one at the rate of the time-stamp counter, as Intel's fixed counter 2.
    Row { name: "bus-cycles",     intel: &[0x013c], amd: &[],              meaning: None },
    // Of the last level, which AMD's core counters do not see; theirs are of the second.
    Row { name: "LLC references", intel: &[0x4f2e], amd: &[],              meaning: None },
    Row { name: "LLC misses",     intel: &[0x412e], amd: &[],              meaning: None },
    // Linux's branch-loads and branch-load-misses are the same as these.
    Row { name: "branches",       intel: &[0x00c4], amd: &[0x00c2],        meaning: Some(Meaning::Branches) },
    Row { name: "branch-misses",  intel: &[0x00c5], amd: &[0x00c3],        meaning: Some(Meaning::BranchMisses) },
    // Intel's have a fixed counter; this is Linux's number for it, which it uses without one, too.
    Row { name: "ref-cycles",     intel: &[0x0300], amd: &[0x1_0000_0120], meaning: Some(Meaning::ReferenceCycles) },
    Row { name: "cache-references (of the L2 cache)",   intel: &[], amd: &[0xff60],         meaning: None },
    Row { name: "cache-misses (of the L2 cache)",       intel: &[], amd: &[0x0964],         meaning: None },
    Row { name: "stalled-cycles-frontend",              intel: &[], amd: &[0x0287, 0x00a9], meaning: None },
    Row { name: "stalled-cycles-backend",               intel: &[], amd: &[0x0187],         meaning: None },
    // Intel counts load instructions here, AMD accesses.
    Row { name: "L1-dcache-loads",                      intel: &[], amd: &[0x0040, 0xff29], meaning: None },
    Row { name: "L1-dcache-load-misses",                intel: &[], amd: &[0xc860, 0xe860], meaning: None },
    Row { name: "L1-dcache-prefetches",                 intel: &[], amd: &[0xff5a],         meaning: None },
    Row { name: "L1-icache-loads",                      intel: &[], amd: &[0x0080],         meaning: None },
    Row { name: "L1-icache-load-misses",                intel: &[], amd: &[0x0081],         meaning: None },
    Row { name: "dTLB-loads or dTLB-load-misses",       intel: &[], amd: &[0xff45, 0xf045], meaning: None },
    Row { name: "iTLB-loads or iTLB-load-misses",       intel: &[], amd: &[0x0084, 0xff85, 0xff84], meaning: None },
];

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
        /// The event and its unit mask; what is left counts cycles with so many, or edges.
        const PLAIN: u64 = 0xf_0000_ffff;
        if self.guest == self.host {
            return Event::Raw(code);
        }
        let row = TABLE.iter().find(|row| row.of(self.guest).contains(&(code & PLAIN)));
        match row {
            Some(Row { meaning: Some(meaning), .. }) if code & !PLAIN == 0 => Event::Meaning(*meaning),
            Some(Row { name, meaning: None, .. }) => Event::Absent { code, name },
            Some(_) => Event::Absent { code, name: "with a threshold or by edges" },
            None => Event::Absent { code, name: "an event of the guest's vendor only" },
        }
    }
}

impl Row {
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
    fn what_has_a_meaning_is_an_event_of_both() {
        for row in TABLE.iter().filter(|row| row.meaning.is_some()) {
            assert!(!row.intel.is_empty() && !row.amd.is_empty(), "{}", row.name);
        }
    }
}
