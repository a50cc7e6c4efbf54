//! The caches that CPUID describes: Intel's leaf 4, AMD's leaf 0x8000001d, and AMD's legacy leaves.

use kvm_bindings::kvm_cpuid_entry2;
use vpmu::x86::{Leaf, Vendor};

use super::{function, put};

/// Type of a cache, in EAX.
const TYPE: u32 = 0x1f;
const DATA: u32 = 1;
const INSTRUCTIONS: u32 = 2;
const UNIFIED: u32 = 3;

/// Returns the caches that a function of CPUID describes: the fields that Intel's leaf 4 and AMD's leaf 0x8000001d have
/// in common. Returns `None` if there are none. The number of cores that share a cache is left out, since
/// [`super::topology`] sets it.
pub fn cache_leaves(entries: &[kvm_cpuid_entry2], function: u32) -> Option<Vec<Leaf>> {
    /// Type, level, self-initialising, fully associative.
    const EAX: u32 = 0x3ff;
    /// Whether WBINVD acts on the caches of lower levels, and whether the cache includes them.
    const EDX: u32 = 3;
    let mut caches: Vec<_> =
        entries.iter().filter(|entry| entry.function == function && entry.eax & TYPE != 0).collect();
    caches.sort_by_key(|entry| entry.index);
    let common_fields = |entry: &&kvm_cpuid_entry2| Leaf {
        eax: entry.eax & EAX,
        ebx: entry.ebx,
        ecx: entry.ecx,
        edx: entry.edx & EDX,
    };
    (!caches.is_empty()).then(|| caches.iter().map(common_fields).collect())
}

/// Returns AMD's leaves 0x80000005 (first-level caches) and 0x80000006 (other caches), for programs that read only
/// these.
pub fn legacy_caches(caches: &[Leaf]) -> (Leaf, Leaf) {
    let (mut first, mut others) = (Leaf::default(), Leaf::default());
    for cache in caches {
        let (ways, line) = ((cache.ebx >> 22) + 1, (cache.ebx & 0xfff) + 1);
        let kib = ways * ((cache.ebx >> 12 & 0x3ff) + 1) * line * (cache.ecx + 1) / 1024;
        // One line per tag.
        let lines = 1 << 8 | line;
        match (cache.eax >> 5 & 7, cache.eax & TYPE) {
            (1, DATA) => first.ecx = kib << 24 | ways << 16 | lines,
            (1, INSTRUCTIONS) => first.edx = kib << 24 | ways << 16 | lines,
            (2, _) => others.ecx = kib << 16 | associativity(ways) << 12 | lines,
            (3, _) => others.edx = (kib / 512) << 18 | associativity(ways) << 12 | lines,
            _ => {}
        }
    }
    (first, others)
}

/// AMD's codes for numbers of ways (APM volume 3, appendix E, table E-4).
const ASSOCIATIVITIES: [(u32, u32); 10] =
    [(1, 1), (2, 2), (4, 4), (6, 8), (8, 16), (0xa, 32), (0xb, 48), (0xc, 64), (0xd, 96), (0xe, 128)];

/// Returns AMD's code for the number of ways.
fn associativity(ways: u32) -> u32 {
    const SEE_0X8000001D: u32 = 9;
    ASSOCIATIVITIES.iter().find(|(_, known)| *known == ways).map_or(SEE_0X8000001D, |(code, _)| *code)
}

/// Returns the caches of an AMD processor that has only the legacy leaves, as leaf 0x8000001d would describe them.
fn from_legacy(first: Leaf, others: Leaf) -> Vec<Leaf> {
    let ways =
        |code: u32| ASSOCIATIVITIES.iter().find(|(known, _)| *known == code).map_or(0, |(_, ways)| *ways);
    let caches = [
        (1, DATA, first.ecx >> 24, first.ecx >> 16 & 0xff, first.ecx),
        (1, INSTRUCTIONS, first.edx >> 24, first.edx >> 16 & 0xff, first.edx),
        (2, UNIFIED, others.ecx >> 16, ways(others.ecx >> 12 & 0xf), others.ecx),
        (3, UNIFIED, (others.edx >> 18) * 512, ways(others.edx >> 12 & 0xf), others.edx),
    ];
    let leaf = |(level, kind, kib, ways, leaf): (u32, u32, u32, u32, u32)| {
        const SELF_INITIALISING: u32 = 1 << 8;
        let line = leaf & 0xff;
        let sets = kib.checked_mul(1024)?.checked_div(ways * line).filter(|sets| *sets > 0)?;
        Some(Leaf {
            eax: kind | level << 5 | SELF_INITIALISING,
            ebx: (ways - 1) << 22 | (line - 1),
            ecx: sets - 1,
            edx: 0,
        })
    };
    caches.into_iter().filter_map(leaf).collect()
}

/// Adds what an AMD processor says of its caches, which KVM leaves out. `host` executes CPUID.
pub fn add_hosts(entries: &mut Vec<kvm_cpuid_entry2>, host: impl Fn(u32, u32) -> Leaf) {
    const TOPOLOGY_EXTENSIONS: u32 = 1 << 22;
    const MAX: u32 = 16;
    if super::vendor(entries) != Some(Vendor::Amd)
        || host(function::LAST_EXTENDED, 0).eax < function::CACHE_L2
    {
        return;
    }
    let legacy = [function::CACHE_L1_AMD, function::CACHE_L2].map(|function| (function, host(function, 0)));
    for (function, leaf) in legacy {
        if !entries.iter().any(|entry| entry.function == function && entry.ecx != 0) {
            put(entries, function, &[leaf]);
        }
    }
    if cache_leaves(entries, function::CACHES_AMD).is_none() {
        let found: Vec<Leaf> = if host(function::EXTENDED_FEATURES, 0).ecx & TOPOLOGY_EXTENSIONS == 0 {
            from_legacy(legacy[0].1, legacy[1].1)
        } else {
            let leaves = (0..MAX).map(|index| host(function::CACHES_AMD, index));
            leaves.take_while(|leaf| leaf.eax & TYPE != 0).collect()
        };
        put(entries, function::CACHES_AMD, &found);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A processor with this highest extended leaf and these leaves.
    fn host(leaves: &[(u32, u32, Leaf)]) -> impl Fn(u32, u32) -> Leaf {
        move |function, index| {
            let found = leaves.iter().find(|(of, at, _)| (*of, *at) == (function, index));
            found.map(|(_, _, leaf)| *leaf).unwrap_or_default()
        }
    }

    fn amd() -> Vec<kvm_cpuid_entry2> {
        let (ebx, edx, ecx) = (0x6874_7541, 0x6974_6e65, 0x444d_4163);
        vec![kvm_cpuid_entry2 { eax: 0xd, ebx, ecx, edx, ..Default::default() }]
    }

    const LAST: (u32, u32, Leaf) = (0x8000_0000, 0, Leaf { eax: 0x8000_0022, ebx: 0, ecx: 0, edx: 0 });
    /// 64 KiB with 2 ways for data and for instructions; 512 KiB with 16 ways; 16 MiB with 16 ways.
    const FIRST: Leaf = Leaf { eax: 0, ebx: 0, ecx: 0x4002_0140, edx: 0x4002_0140 };
    const OTHERS: Leaf = Leaf { eax: 0, ebx: 0, ecx: 0x0200_8140, edx: 0x0080_8140 };

    #[test]
    fn the_legacy_leaves_describe_all_caches_if_the_host_has_no_others() {
        let mut entries = amd();
        add_hosts(&mut entries, host(&[LAST, (0x8000_0005, 0, FIRST), (0x8000_0006, 0, OTHERS)]));
        let found = cache_leaves(&entries, function::CACHES_AMD).expect("there are some");
        let kinds: Vec<_> =
            found.iter().map(|leaf| (leaf.eax >> 5 & 7, leaf.eax & TYPE, leaf.ecx + 1)).collect();
        assert_eq!(kinds, [(1, DATA, 512), (1, INSTRUCTIONS, 512), (2, UNIFIED, 512), (3, UNIFIED, 16_384)]);
        assert_eq!(legacy_caches(&found), (FIRST, OTHERS));
    }

    #[test]
    fn the_hosts_leaves_are_taken_up_to_the_first_without_a_cache() {
        let cache = |index| (0x8000_001d, index, Leaf { eax: 0x121, ebx: 7, ecx: index, edx: 0 });
        let features = (0x8000_0001, 0, Leaf { ecx: 1 << 22, ..Leaf::default() });
        let mut entries = amd();
        add_hosts(&mut entries, host(&[LAST, features, cache(0), cache(1), cache(3)]));
        assert_eq!(cache_leaves(&entries, function::CACHES_AMD).map(|caches| caches.len()), Some(2));
    }

    #[test]
    fn what_kvm_reports_stays() {
        let own = Leaf { eax: 0x121, ebx: 1, ecx: 1, edx: 0 };
        let mut entries = amd();
        put(&mut entries, function::CACHES_AMD, &[own]);
        put(&mut entries, function::CACHE_L2, &[OTHERS]);
        add_hosts(&mut entries, host(&[LAST, (0x8000_0006, 0, FIRST)]));
        assert_eq!(cache_leaves(&entries, function::CACHES_AMD), Some(vec![own]));
        assert!(entries.iter().any(|entry| entry.function == 0x8000_0006 && entry.ecx == OTHERS.ecx));
    }
}
