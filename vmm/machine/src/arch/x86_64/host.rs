//! The host's processor.

use std::fmt;

use kvm_ioctls::Kvm;
use vpmu::x86::Vendor;

use super::cpuid;
use super::pmu::Pmu;
use crate::kvm_error::KvmError;

/// Vendor of a processor, or `None` if Tally does not know that vendor's PMUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Processor(pub Option<Vendor>);

impl Processor {
    /// Returns the host's processor.
    pub fn of(kvm: &Kvm) -> Result<Self, KvmError> {
        cpuid::host_vendor(kvm).map(Self)
    }

    /// Returns the Linux parameters that a guest with this PMU needs on this processor.
    pub fn kernel_words(self, pmu: Pmu) -> Option<&'static str> {
        cpuid::kernel_words(self.0, pmu.identity())
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
