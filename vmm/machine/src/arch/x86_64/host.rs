//! The host's processor.

use std::arch::x86_64::{__cpuid, CpuidResult};
use std::fmt;

use vpmu::x86::{Leaf, Vendor};

/// Vendor of a processor, or `None` if Tally does not know that vendor's PMUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Processor(pub Option<Vendor>);

impl Processor {
    /// Returns the host's processor.
    pub fn of_this_host() -> Self {
        let CpuidResult { eax, ebx, ecx, edx } = __cpuid(0);
        Self(Vendor::of(Leaf { eax, ebx, ecx, edx }))
    }
}

/// Returns the CPUID leaves that say which processor this is and what it can do, without what differs from CPU to CPU.
pub fn identity() -> Vec<u8> {
    /// In leaf 1, EBX: the initial APIC id.
    const APIC_ID: u32 = 0xff << 24;
    const LEAVES: [u32; 6] = [0, 1, 7, 0x8000_0001, 0x8000_0007, 0x8000_0008];
    let registers = LEAVES.into_iter().flat_map(|leaf| {
        let CpuidResult { eax, mut ebx, ecx, edx } = __cpuid(leaf);
        ebx &= if leaf == 1 { !APIC_ID } else { !0 };
        [eax, ebx, ecx, edx]
    });
    registers.flat_map(u32::to_ne_bytes).collect()
}

impl fmt::Display for Processor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Some(Vendor::Amd) => "AMD's processor",
            Some(Vendor::Intel) => "Intel's processor",
            None => "another vendor's processor",
        })
    }
}
