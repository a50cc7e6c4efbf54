//! Events that take two hardware counters of the host. AMD's processors since family 17h count events that can happen
//! more than 15 times in a cycle in a pair of counters, the second of which has the Merge event (PPR, "Large Increment
//! per Cycle Events"). Linux chooses both by itself (`PMU_FL_PAIR` in arch/x86/events/amd/core.c).

use vpmu::event::Event;

/// Whether this host's kernel pairs counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairs {
    /// Every event takes one counter.
    None,
    /// AMD's large increments take two.
    OfAmd,
}

impl Pairs {
    /// Returns what the kernel does on this processor.
    pub fn of_this_host() -> Self {
        if cpu::has_pairs() { Self::OfAmd } else { Self::None }
    }

    /// Returns the number of counters that an event takes.
    pub fn hardware_counters(self, event: Event) -> usize {
        /// The bits of the event's number.
        const NUMBER: u64 = 0xf_0000_00ff;
        /// Retired floating-point operations of SSE and AVX: the only event for which Linux takes a pair.
        const FLOPS: u64 = 0x03;
        match (self, event) {
            (Self::OfAmd, Event::Raw(code)) if code & NUMBER == FLOPS => 2,
            _ => 1,
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod cpu {
    use std::arch::x86_64::__cpuid;

    /// Returns whether the processor is one whose counters Linux pairs.
    pub fn has_pairs() -> bool {
        const EXTENDED: u32 = 0x8000_0001;
        let vendor = __cpuid(0);
        let name = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes);
        let name = name.as_flattened();
        (name == b"AuthenticAMD" || name == b"HygonGenuine")
            && __cpuid(0x8000_0000).eax >= EXTENDED
            && pairs(__cpuid(1).eax, __cpuid(EXTENDED).ecx)
    }

    /// Returns whether a processor of AMD's is one: by the version in leaf 1, and the features in ECX of leaf
    /// 0x80000001.
    pub fn pairs(version: u32, features: u32) -> bool {
        const PERF_CTR_EXT_CORE: u32 = 1 << 23;
        let (base, extended) = (version >> 8 & 0xf, version >> 20 & 0xff);
        let family = if base == 0xf { base + extended } else { base };
        family >= 0x17 && features & PERF_CTR_EXT_CORE != 0
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod cpu {
    /// Returns false: only Linux on x86 pairs counters.
    pub fn has_pairs() -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_amds_large_increments_take_two_counters() {
        let taken = |pairs: Pairs| {
            [0x03, 0xff03, 0x0100_0003, 0x1_0000_0003, 0xc0, 0x0300]
                .map(|code| pairs.hardware_counters(Event::Raw(code)))
        };
        assert_eq!(taken(Pairs::OfAmd), [2, 2, 2, 1, 1, 1]);
        assert_eq!(taken(Pairs::None), [1; 6]);
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn linux_pairs_the_counters_of_amds_processors_since_zen() {
        for (version, expected) in [(0x0083_0f10, true), (0x00a2_0f10, true), (0x0060_0f20, false)] {
            assert_eq!(cpu::pairs(version, 1 << 23), expected, "{version:#x}");
            assert!(!cpu::pairs(version, 0), "the K7's counters");
        }
    }
}
