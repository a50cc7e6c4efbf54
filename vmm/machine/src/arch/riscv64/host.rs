//! The host's processor.

use std::{fmt, fs};

use kvm_ioctls::Kvm;

use super::pmu::Pmu;
use crate::kvm_error::KvmError;

/// The properties of a processor that matter to PMUs. All RISC-V processors are alike in this, so it is empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Processor;

impl Processor {
    /// Returns the host's processor.
    #[expect(clippy::unnecessary_wraps, reason = "on x86-64 KVM is asked, which may fail")]
    pub fn of(_kvm: &Kvm) -> Result<Self, KvmError> {
        Ok(Self)
    }

    /// Returns kernel parameters that a guest with this PMU needs. If the SBI has no PMU extension, Linux' legacy PMU
    /// driver assumes that `cycle` and `instret` can be read. The kernel dies if they cannot, so the driver is
    /// disabled.
    pub fn kernel_words(self, pmu: Pmu) -> Option<&'static str> {
        (pmu == Pmu::None).then_some("initcall_blacklist=riscv_pmu_legacy_devinit")
    }
}

impl fmt::Display for Processor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a RISC-V processor")
    }
}

/// Returns true if the host's processor has this multi-letter ISA extension.
pub fn has(extension: &str) -> bool {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    value(&cpuinfo, "isa").split('_').any(|word| word == extension)
}

/// Returns the value of a key for the first processor.
fn value<'a>(cpuinfo: &'a str, key: &str) -> &'a str {
    let mut fields = cpuinfo.lines().filter_map(|line| line.split_once(':'));
    fields.find(|(name, _)| name.trim() == key).map_or("?", |(_, value)| value.trim())
}
