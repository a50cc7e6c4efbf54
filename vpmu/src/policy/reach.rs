//! Tiers of the events that are not in the translation's table: whether an event counts only what happens in the core
//! and its private caches, or also what other cores affect.
//!
//! An undocumented event may count anything, so it is in the highest tier.

use std::ops::RangeInclusive;

use crate::tier::Tier;
use crate::x86::Vendor;

/// Event numbers of Intel's cores since Nehalem, big and small ones. They are those that Linux lists
/// (tools/perf/pmu-events/arch/x86, up to Sapphire Rapids and Alder Lake), which has them from Intel's own lists. Left
/// out are events that count outside of the core with any unit mask: those of the last-level cache (2eh), of requests
/// to the uncore and their responses (20h, 21h, 2ah, 2bh, 60h, b0h, b2h, b7h, b8h, bbh), of where loads were served
/// (d2h to d4h), of load latency (cdh), of snoops (b3h, b4h, efh) and of the super queue (f4h, f6h, feh).
#[rustfmt::skip]
const INTEL_CORE: [RangeInclusive<u64>; 41] = [
    0x00..=0x00, 0x02..=0x09, 0x0b..=0x0f, 0x11..=0x14, 0x17..=0x19, 0x1e..=0x1e, 0x24..=0x29, 0x2d..=0x2d, 0x30..=0x32,
    0x34..=0x34, 0x3c..=0x3c, 0x40..=0x45, 0x47..=0x49, 0x4c..=0x4c, 0x4e..=0x4f, 0x51..=0x56, 0x58..=0x59, 0x5b..=0x5f,
    0x61..=0x61, 0x63..=0x64, 0x6c..=0x6c, 0x70..=0x76, 0x78..=0x79, 0x7d..=0x7d, 0x80..=0x80, 0x82..=0x83, 0x85..=0x89,
    0x9c..=0x9c, 0xa0..=0xae, 0xb1..=0xb1, 0xb6..=0xb6, 0xbc..=0xbd, 0xbf..=0xcc, 0xce..=0xce, 0xd0..=0xd1, 0xd5..=0xd5,
    0xdb..=0xdc, 0xe0..=0xe0, 0xe4..=0xe9, 0xec..=0xec, 0xf0..=0xf2,
];

/// The events of [`INTEL_CORE`] that count outside of the second-level cache if the unit mask has any of these bits.
#[rustfmt::skip]
const INTEL_BEYOND: [(u64, u64); 12] = [
    (0x04, 0x20), // Silvermont: loads that hit a modified line of another core.
    (0x0f, ALL),  // Nehalem: loads served by the uncore.
    (0x2d, ALL),  // The queue to the uncore.
    (0x30, ALL),  // Rejects of that queue.
    (0x34, ALL),  // Small cores: stalls for the last-level cache and memory.
    (0x47, 0x08), // Stalls with last-level cache misses.
    (0x63, ALL),  // Bus locks.
    (0x6c, ALL),  // Nehalem: I/O.
    (0xa3, 0x02), // Cycles and stalls with last-level cache misses.
    (0xbc, 0x0c), // Page walks served by the last-level cache and memory.
    (0xcb, 0x1c), // Nehalem: loads served by the last-level cache and memory.
    (0xd1, 0xa4), // Loads that hit or missed the last-level cache, or were served by memory.
];

/// Event numbers of AMD's core and its second-level cache (PPRs of families 17h to 1Ah, "Core Performance Monitor
/// Counters"): floating point, load and store, caches, fetch and prediction, decode, execution; the same again from
/// 180h on; and the op cache. In older families, the numbers from e0h on were the northbridge's.
const AMD_CORE: [RangeInclusive<u64>; 3] = [0x00..=0xdf, 0x180..=0x1df, 0x280..=0x29f];

/// The events of [`AMD_CORE`] that count outside of the second-level cache if the unit mask has any of these bits.
#[rustfmt::skip]
const AMD_BEYOND: [(u64, u64); 12] = [
    (0x42, ALL),  // Older families: refills from the system.
    (0x43, !L2),  // Demand fills, by their source.
    (0x44, !L2),  // Any fills, by their source.
    (0x59, !L2),  // Software prefetch fills, by their source.
    (0x5a, !L2),  // Hardware prefetch fills, by their source.
    (0x62, ALL),  // Cycles in which the cache waits for fills.
    (0x65, ALL),  // Older families: requests to memory.
    (0x6c, ALL),  // Older families: responses of the system.
    (0x6d, ALL),  // Pending fills.
    (0x71, ALL),  // Prefetches that hit the third-level cache.
    (0x72, ALL),  // Prefetches that missed it.
    (0x83, ALL),  // Instruction cache fills from the system.
];

/// Matches every unit mask.
const ALL: u64 = !0;
/// Unit mask of fills from the core's own second-level cache.
const L2: u64 = 0x01;

/// Returns the lowest tier that has an encoding.
pub fn tier(vendor: Vendor, code: u64) -> Tier {
    let event = code & 0xff | code >> 24 & 0xf00;
    let unit_mask = code >> 8 & 0xff;
    let (known, beyond) = match vendor {
        Vendor::Intel => (INTEL_CORE.as_slice(), INTEL_BEYOND.as_slice()),
        Vendor::Amd => (AMD_CORE.as_slice(), AMD_BEYOND.as_slice()),
    };
    let is_beyond = |&(number, bits): &(u64, u64)| number == event && (bits == ALL || unit_mask & bits != 0);
    if known.iter().any(|numbers| numbers.contains(&event)) && !beyond.iter().any(is_beyond) {
        Tier::Standard
    } else {
        Tier::Enhanced
    }
}
