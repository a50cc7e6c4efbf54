//! Where x86 processors keep their PMUs: model-specific registers and CPUID bits, of either vendor.

use std::ops::RangeInclusive;

/// The MSRs of PMUs: counters, what selects and controls them, and sampling. Few enough ranges for a KVM MSR filter (16).
///
/// AMD: APM volume 2, section 13.2 and appendix A. Intel: SDM volume 4, table 2-2. Branch records (LBR) are no counters:
/// KVM gives them to no guest that lacks their CPUID bits.
pub const PMU_MSRS: [RangeInclusive<u32>; 16] = [
    // Intel: counters, event selects, off-core responses.
    0xc1..=0xc8,
    0x186..=0x18d,
    0x1a6..=0x1a7,
    // Intel: fixed counters, metrics, PERF_CAPABILITIES, global control and status, PEBS, full-width counters, debug store.
    0x309..=0x30c,
    0x329..=0x329,
    0x345..=0x345,
    0x38d..=0x392,
    0x3f1..=0x3f7,
    0x4c1..=0x4c8,
    0x600..=0x600,
    // Intel: version 6's counters.
    0x1900..=0x19ff,
    // AMD: PerfMonV2's global registers, K7 counters, core counters, L3 and northbridge counters, instruction-based sampling.
    0xc000_0300..=0xc000_0303,
    0xc001_0000..=0xc001_0007,
    0xc001_0200..=0xc001_020b,
    0xc001_0230..=0xc001_024f,
    0xc001_1030..=0xc001_103d,
];

/// Where a PMU's interrupt can be made to stop its counters, beside much else that is not a PMU's (SDM volume 4, table 2-2).
pub const DEBUGCTL: u32 = 0x1d9;
/// What in it is the PMU's: `FREEZE_PERFMON_ON_PMI`.
pub const FREEZE_AT_INTERRUPTS: u64 = 1 << 12;

/// Where the local APIC is told what an overflow becomes, in x2APIC mode (SDM volume 3, table 12-6).
pub const OVERFLOW_ENTRY: u32 = 0x834;

/// The "MSRs" that are counters: the loader makes RDPMC, which no monitor gets to see, an RDMSR of the counter's number.
/// First the general counters, then Intel's fixed ones, and both with the bit by which the Pentium 4 asked for half of one.
/// A few of these numbers are MSRs, too (of the Pentium's machine check, of Hyper-V), which no guest reads here.
pub const RDPMC_MSRS: [RangeInclusive<u32>; 4] = [
    0..=RDPMC_COUNTERS - 1,
    RDPMC_FIXED..=RDPMC_FIXED + 3,
    0x8000_0000..=0x8000_0000 + RDPMC_COUNTERS - 1,
    0xc000_0000..=0xc000_0003,
];

/// So many general counters RDPMC can ask for, from 0 on.
pub const RDPMC_COUNTERS: u32 = 8;

/// The number of the first fixed counter.
pub const RDPMC_FIXED: u32 = 1 << 30;

/// Whether the register belongs to a PMU.
pub fn is_pmu_msr(msr: u32) -> bool {
    PMU_MSRS.iter().any(|range| range.contains(&msr))
}

/// Whether it is a counter's number, for RDPMC.
pub fn is_rdpmc(number: u32) -> bool {
    RDPMC_MSRS.iter().any(|range| range.contains(&number))
}

/// The four registers that CPUID returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Leaf {
    /// EAX.
    pub eax: u32,
    /// EBX.
    pub ebx: u32,
    /// ECX.
    pub ecx: u32,
    /// EDX.
    pub edx: u32,
}

/// Who made a processor, as far as PMUs go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vendor {
    /// AMD, and Hygon, whose processors are AMD's in this respect.
    Amd,
    /// Intel.
    Intel,
}

impl Vendor {
    /// From CPUID's leaf 0, if it is one of these.
    pub fn of(leaf: Leaf) -> Option<Self> {
        let name = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes);
        match name.as_flattened() {
            b"AuthenticAMD" | b"HygonGenuine" => Some(Self::Amd),
            b"GenuineIntel" => Some(Self::Intel),
            _ => None,
        }
    }
}

/// Takes everything about a PMU out of what CPUID says at `function` and, where it matters, `index`.
pub fn hide_pmu(function: u32, index: u32, leaf: &mut Leaf) {
    const DTES64: u32 = 1 << 2;
    const DS_CPL: u32 = 1 << 4;
    const PDCM: u32 = 1 << 15;
    const DEBUG_STORE: u32 = 1 << 21;
    const ARCH_LBR: u32 = 1 << 19;
    const IBS: u32 = 1 << 10;
    /// `PerfCtrExtCore`, `PerfCtrExtNB`, `PerfTsc`, `PerfCtrExtLLC`.
    const COUNTER_EXTENSIONS: u32 = 1 << 23 | 1 << 24 | 1 << 27 | 1 << 28;
    match (function, index) {
        (1, _) => {
            leaf.ecx &= !(DTES64 | DS_CPL | PDCM);
            leaf.edx &= !DEBUG_STORE;
        }
        (7, 0) => leaf.edx &= !ARCH_LBR,
        (0x8000_0001, _) => leaf.ecx &= !(IBS | COUNTER_EXTENSIONS),
        // Architectural monitoring, Intel's LBRs; AMD's sampling, PerfMonV2.
        (0xa | 0x1c | 0x23 | 0x8000_001b | 0x8000_0022, _) => *leaf = Leaf::default(),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Leaf = Leaf { eax: !0, ebx: !0, ecx: !0, edx: !0 };

    #[test]
    fn a_filter_can_hold_all_ranges() {
        assert!(PMU_MSRS.len() <= 16);
        for ranges in [PMU_MSRS.as_slice(), &RDPMC_MSRS] {
            assert!(ranges.windows(2).all(|w| w[0].end() < w[1].start()), "ascending and apart");
        }
    }

    #[test]
    fn cpuid_shows_no_pmu_of_either_vendor() {
        for function in [0xa, 0x8000_0022, 0x8000_001b] {
            let mut leaf = ALL;
            hide_pmu(function, 0, &mut leaf);
            assert_eq!(leaf, Leaf::default(), "{function:#x}");
        }
        let mut leaf = ALL;
        hide_pmu(0x8000_0001, 0, &mut leaf);
        assert_eq!(leaf.ecx, !(1 << 10 | 1 << 23 | 1 << 24 | 1 << 27 | 1 << 28));
    }

    #[test]
    fn vendors_are_known_by_their_names() {
        let named = |name: &[u8; 12]| {
            let [ebx, edx, ecx] =
                [0, 4, 8].map(|at| u32::from_le_bytes([name[at], name[at + 1], name[at + 2], name[at + 3]]));
            Vendor::of(Leaf { eax: 0xd, ebx, ecx, edx })
        };
        assert_eq!(named(b"AuthenticAMD"), Some(Vendor::Amd));
        assert_eq!(named(b"HygonGenuine"), Some(Vendor::Amd));
        assert_eq!(named(b"GenuineIntel"), Some(Vendor::Intel));
        assert_eq!(named(b"  Shanghai  "), None);
    }

    #[test]
    fn other_leaves_stay_as_they_are() {
        for (function, index) in [(0, 0), (2, 0), (7, 1), (0xb, 0), (0x4000_0001, 0), (0x8000_0008, 0)] {
            let mut leaf = ALL;
            hide_pmu(function, index, &mut leaf);
            assert_eq!(leaf, ALL, "{function:#x}");
        }
    }
}
