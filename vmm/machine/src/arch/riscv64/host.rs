//! The processor that the host has.

use std::{fmt, fs};

use kvm_ioctls::Kvm;

use super::pmu::Pmu;
use crate::kvm_error::KvmError;

/// A processor, as far as PMUs go: all have the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Processor;

impl Processor {
    /// The host's.
    #[expect(clippy::unnecessary_wraps, reason = "other processors have to be asked")]
    pub fn of(_kvm: &Kvm) -> Result<Self, KvmError> {
        Ok(Self)
    }

    /// What a kernel has to be told of its processor. Where the SBI has no PMU, Linux takes it that `cycle` and `instret` can be
    /// read all the same, and dies when they cannot.
    pub fn kernel_words(self, pmu: Pmu) -> Option<&'static str> {
        (pmu == Pmu::None).then_some("initcall_blacklist=riscv_pmu_legacy_devinit")
    }
}

impl fmt::Display for Processor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a RISC-V processor")
    }
}

/// Whether the host's processor has an extension that is a word.
pub fn has(extension: &str) -> bool {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    value(&cpuinfo, "isa").split('_').any(|word| word == extension)
}

/// What the first processor has for a key.
fn value<'a>(cpuinfo: &'a str, key: &str) -> &'a str {
    let mut fields = cpuinfo.lines().filter_map(|line| line.split_once(':'));
    fields.find(|(name, _)| name.trim() == key).map_or("?", |(_, value)| value.trim())
}
