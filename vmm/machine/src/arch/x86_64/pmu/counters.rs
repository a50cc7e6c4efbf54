//! The number of counters of the host's processor.

use std::arch::x86_64::__cpuid;

use vpmu::x86::{Leaf, Vendor};

/// Returns the number of general-purpose counters of the processor on which this thread runs, or `None` if CPUID does
/// not show it.
pub fn host_counters() -> Option<usize> {
    of_cpuid(leaf)
}

fn leaf(function: u32) -> Leaf {
    let registers = __cpuid(function);
    Leaf { eax: registers.eax, ebx: registers.ebx, ecx: registers.ecx, edx: registers.edx }
}

/// Returns the number of general-purpose counters that CPUID describes (APM volume 3, E.4; SDM volume 2, CPUID).
fn of_cpuid(leaf: impl Fn(u32) -> Leaf) -> Option<usize> {
    const EXTENDED: u32 = 0x8000_0000;
    const PERFMON_V2: u32 = 0x8000_0022;
    const SIX: u32 = 1 << 23;
    let counters = match Vendor::of(leaf(0))? {
        Vendor::Intel => leaf(0xa).eax >> 8 & 0xff,
        Vendor::Amd if leaf(EXTENDED).eax >= PERFMON_V2 && leaf(PERFMON_V2).eax & 1 != 0 => {
            leaf(PERFMON_V2).ebx & 0xf
        }
        Vendor::Amd if leaf(EXTENDED + 1).ecx & SIX != 0 => 6,
        Vendor::Amd => 4,
    };
    (counters > 0).then_some(counters as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the CPUID of a processor of this vendor with these leaves.
    fn processor(vendor: &[u8; 12], leaves: &[(u32, Leaf)]) -> impl Fn(u32) -> Leaf {
        let word = |at: usize| u32::from_le_bytes(vendor[at..at + 4].try_into().unwrap());
        let name = Leaf { ebx: word(0), edx: word(4), ecx: word(8), ..Leaf::default() };
        move |function| {
            let registers = leaves.iter().find(|(known, _)| *known == function).map(|(_, leaf)| *leaf);
            if function == 0 { name } else { registers.unwrap_or_default() }
        }
    }

    const fn eax(eax: u32) -> Leaf {
        Leaf { eax, ebx: 0, ecx: 0, edx: 0 }
    }

    #[test]
    fn each_vendor_reports_its_number_of_counters_in_its_own_leaves() {
        const SIX: Leaf = Leaf { eax: 0, ebx: 0, ecx: 1 << 23, edx: 0 };
        const V2: Leaf = Leaf { eax: 1, ebx: 5, ecx: 0, edx: 0 };
        let counters = |vendor: &[u8; 12], leaves: &[(u32, Leaf)]| of_cpuid(processor(vendor, leaves));
        assert_eq!(counters(b"GenuineIntel", &[(0xa, eax(0x0730_0804))]), Some(8));
        assert_eq!(counters(b"GenuineIntel", &[]), None, "as in a virtual machine without a PMU");
        assert_eq!(counters(b"AuthenticAMD", &[(0x8000_0000, eax(0x8000_001f))]), Some(4));
        assert_eq!(counters(b"AuthenticAMD", &[(0x8000_0001, SIX)]), Some(6));
        let zen4 = &[(0x8000_0000, eax(0x8000_0028)), (0x8000_0001, SIX), (0x8000_0022, V2)];
        assert_eq!(counters(b"AuthenticAMD", zen4), Some(5));
        assert_eq!(counters(b"CentaurHauls", &[]), None);
    }
}
