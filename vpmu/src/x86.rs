//! The PMU's MSRs and CPUID bits on x86 processors of both vendors.

use std::ops::RangeInclusive;

use crate::event::{Event, GenericEvent};

/// The MSRs of PMUs: counters, event selects, global control and sampling. A KVM MSR filter has 16 ranges at most.
///
/// AMD: APM volume 2, section 13.2 and appendix A. Intel: SDM volume 4, table 2-2. Branch records (LBR) are not
/// included, because KVM hides them from a guest that lacks their CPUID bits.
pub const PMU_MSRS: [RangeInclusive<u32>; 16] = [
    // Intel: counters, event selects, off-core responses.
    0xc1..=0xc8,
    0x186..=0x18d,
    0x1a6..=0x1a7,
    // Intel: fixed counters, metrics, PERF_CAPABILITIES, global control and status, PEBS, full-width counters, debug
    // store.
    0x309..=0x30c,
    0x329..=0x329,
    0x345..=0x345,
    0x38d..=0x392,
    0x3f1..=0x3f7,
    0x4c1..=0x4c8,
    0x600..=0x600,
    // Intel: the counters of version 6.
    0x1900..=0x19ff,
    // AMD: PerfMonV2's global registers, K7 counters, core counters, L3 and northbridge counters, instruction-based
    // sampling.
    0xc000_0300..=0xc000_0303,
    0xc001_0000..=0xc001_0007,
    0xc001_0200..=0xc001_020b,
    0xc001_0230..=0xc001_024f,
    0xc001_1030..=0xc001_103d,
];

/// The events that count all retired instructions: both vendors' encoding is the same.
pub const INSTRUCTIONS: [Event; 2] = [Event::Generic(GenericEvent::Instructions), Event::Raw(0xc0)];

/// The events of AMD's PMU that count cycles.
pub const AMD_CYCLES: [Event; 2] = [Event::Generic(GenericEvent::Cycles), Event::Raw(0x76)];
/// The events of Intel's PMU that count cycles (SDM volume 3, table 20-1).
pub const INTEL_CYCLES: [Event; 4] = [
    Event::Generic(GenericEvent::Cycles),
    Event::Generic(GenericEvent::ReferenceCycles),
    Event::Raw(0x3c),
    Event::Raw(0x13c),
];

/// `IA32_DEBUGCTL`. Only [`FREEZE_PERFMON_ON_PMI`] belongs to the PMU (SDM volume 4, table 2-2).
pub const DEBUGCTL: u32 = 0x1d9;
/// `FREEZE_PERFMON_ON_PMI` in [`DEBUGCTL`]: an overflow that interrupts freezes all counters.
pub const FREEZE_PERFMON_ON_PMI: u64 = 1 << 12;

/// Bits of [`DEBUGCTL`] that are KVM's and may be set for a guest: BTF (bit 1), single steps from branch to branch.
pub const DEBUGCTL_OF_KVM: u64 = 1 << 1;
/// Bits of [`DEBUGCTL`] that a guest may set without an effect: LBR (bit 0), of which KVM takes no notice either if a
/// guest has no branch records.
pub const DEBUGCTL_IGNORED: u64 = 1 << 0;

/// The local APIC's LVT entry for counter overflows, in x2APIC mode (SDM volume 3, table 12-6).
pub const X2APIC_LVTPC: u32 = 0x834;

/// RDPMC numbers that a guest reads with RDMSR: a VMM cannot trap RDPMC, so a kernel's RDPMC instructions can be
/// changed into RDMSR, which takes the number of the counter in the same register.
///
/// The ranges are the general counters, Intel's fixed counters, and both with bit 31, by which the Pentium 4 returned
/// the lower half of a counter. A few of these numbers are also MSRs (the Pentium's machine check, Hyper-V's), which no
/// guest reads here.
pub const RDPMC_MSRS: [RangeInclusive<u32>; 4] = [
    0..=RDPMC_COUNTERS - 1,
    RDPMC_FIXED..=RDPMC_FIXED + 3,
    0x8000_0000..=0x8000_0000 + RDPMC_COUNTERS - 1,
    0xc000_0000..=0xc000_0003,
];

/// Number of general counters that RDPMC can read; their RDPMC numbers begin at 0.
pub const RDPMC_COUNTERS: u32 = 8;

/// RDPMC number of the first fixed counter.
pub const RDPMC_FIXED: u32 = 1 << 30;

/// "MSRs" that stand for RDPMC in a program. KVM lets a program's RDPMC fault (#GP) without an exit to user space, so a
/// VMM can have the guest's handler of such faults read one of these numbers instead, which exits
/// ([`rdpmc_in_program`]). Neither processors nor hypervisors have MSRs there; KVM's begin at `0x4b56_4d00`.
pub const PROGRAM_MSRS: RangeInclusive<u32> = 0x5461_6c00..=0x5461_6c7f;

/// In the numbers of [`PROGRAM_MSRS`], the bit of Intel's fixed counters. It stands for [`RDPMC_FIXED`].
pub const PROGRAM_FIXED: u32 = 1 << 6;

/// What a read of one of [`PROGRAM_MSRS`] returns if the fault was not caused by an RDPMC that the program may execute.
/// Counters are not as wide.
pub const NOT_PERMITTED: u64 = 1 << 63;

/// Returns the RDPMC number for which one of [`PROGRAM_MSRS`] stands, or `None` for other MSRs. There may be no such
/// counter.
pub fn rdpmc_in_program(msr: u32) -> Option<u32> {
    let bits = PROGRAM_MSRS.contains(&msr).then(|| msr - PROGRAM_MSRS.start())?;
    let fixed = if bits & PROGRAM_FIXED == 0 { 0 } else { RDPMC_FIXED };
    Some(bits & !PROGRAM_FIXED | fixed)
}

/// Returns whether an MSR belongs to a PMU ([`PMU_MSRS`]).
pub fn is_pmu_msr(msr: u32) -> bool {
    PMU_MSRS.iter().any(|range| range.contains(&msr))
}

/// Returns whether a number is the RDPMC number of a counter ([`RDPMC_MSRS`]).
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

/// Vendor of a processor, or of the PMU that a guest sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vendor {
    /// AMD, and Hygon, whose processors have AMD's PMU.
    Amd,
    /// Intel.
    Intel,
}

impl Vendor {
    /// Returns the vendor named by CPUID leaf 0, if it is one of these.
    pub fn of(leaf: Leaf) -> Option<Self> {
        let name = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes);
        match name.as_flattened() {
            b"AuthenticAMD" | b"HygonGenuine" => Some(Self::Amd),
            b"GenuineIntel" => Some(Self::Intel),
            _ => None,
        }
    }
}

/// Clears everything about PMUs in the CPUID leaf `function` with subleaf `index`.
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
        // Intel: architectural performance monitoring, LBRs. AMD: instruction-based sampling, PerfMonV2.
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
    fn a_read_for_a_program_names_one_of_the_counters() {
        let read: Vec<u32> = (0x5461_0000..0x5462_0000).filter_map(rdpmc_in_program).collect();
        let fixed = RDPMC_FIXED..RDPMC_FIXED + 64;
        assert_eq!(read, (0..64).chain(fixed).collect::<Vec<_>>());
        assert!(PMU_MSRS.iter().chain(&RDPMC_MSRS).all(|range| !PROGRAM_MSRS.contains(range.start())));
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
    fn vendors_are_recognized_by_cpuid() {
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
