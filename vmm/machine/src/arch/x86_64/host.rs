//! The host's processor.

use std::arch::x86_64::{__cpuid, CpuidResult};
use std::fmt;

use vpmu::x86::{Leaf, Vendor};

/// Vendor of a processor, or `None` if Tally does not know that vendor's PMUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Processor(pub Option<Vendor>);

impl Processor {
    pub fn of_this_host() -> Self {
        let CpuidResult { eax, ebx, ecx, edx } = __cpuid(0);
        Self(Vendor::of(Leaf { eax, ebx, ecx, edx }))
    }
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
