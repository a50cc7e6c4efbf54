//! The PMU's registers by their MSR numbers.

use super::{Shape, Version};
use crate::x86;

/// A register of the PMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Register {
    /// `IA32_PERFEVTSEL` of this general counter.
    Select(usize),
    /// `IA32_PMC` of this general counter. A write has 32 bits.
    Counter(usize),
    /// `IA32_A_PMC` of this general counter. A write has the counter's full width.
    Alias(usize),
    /// `IA32_FIXED_CTR` of this fixed counter.
    Fixed(usize),
    /// This counter of the unit, by its RDPMC number.
    Rdpmc(usize),
    /// `IA32_FIXED_CTR_CTRL`.
    FixedControl,
    /// `IA32_PERF_GLOBAL_STATUS`.
    Status,
    /// `IA32_PERF_GLOBAL_CTRL`.
    Control,
    /// `IA32_PERF_GLOBAL_OVF_CTRL`, or since version 4 `IA32_PERF_GLOBAL_STATUS_RESET`.
    StatusClear,
    /// `IA32_PERF_GLOBAL_STATUS_SET`.
    StatusSet,
    /// `IA32_PERF_GLOBAL_INUSE`.
    InUse,
    /// `IA32_PERF_CAPABILITIES`.
    Capabilities,
    /// The PMU's bit of `IA32_DEBUGCTL`.
    DebugControl,
    /// A register of other PMUs, which this PMU does not have.
    Absent,
    /// Not a register of a PMU.
    Other,
}

/// `IA32_PMC0`.
pub const COUNTER: u32 = 0xc1;
const COUNTERS_END: u32 = 0xc9;
/// `IA32_PERFEVTSEL0`.
pub const SELECT: u32 = 0x186;
const SELECTS_END: u32 = 0x18e;
/// `IA32_FIXED_CTR0`.
pub const FIXED: u32 = 0x309;
const FIXED_END: u32 = 0x30d;
const CAPABILITIES: u32 = 0x345;
/// `IA32_FIXED_CTR_CTRL`.
pub const FIXED_CONTROL: u32 = 0x38d;
/// `IA32_PERF_GLOBAL_STATUS`.
pub const STATUS: u32 = 0x38e;
/// `IA32_PERF_GLOBAL_CTRL`.
pub const CONTROL: u32 = 0x38f;
/// `IA32_PERF_GLOBAL_STATUS_RESET`.
pub const STATUS_CLEAR: u32 = 0x390;
const STATUS_SET: u32 = 0x391;
const IN_USE: u32 = 0x392;
/// `IA32_A_PMC0`.
pub const ALIAS: u32 = 0x4c1;
const ALIASES_END: u32 = 0x4c9;
const RDPMC_FIXED_END: u32 = x86::RDPMC_FIXED + 4;

impl Register {
    /// Returns the register with this MSR number.
    pub fn at(msr: u32, shape: Shape) -> Self {
        let existing = |base: u32, counters: usize| {
            let counter = usize::try_from(msr - base).ok()?;
            (counter < counters).then_some(counter)
        };
        let newer = |register| (shape.version == Version::V5).then_some(register);
        let found = match msr {
            0..x86::RDPMC_COUNTERS => existing(0, shape.general).map(Self::Rdpmc),
            x86::RDPMC_FIXED..RDPMC_FIXED_END => {
                existing(x86::RDPMC_FIXED, shape.fixed).map(|counter| Self::Rdpmc(shape.general + counter))
            }
            COUNTER..COUNTERS_END => existing(COUNTER, shape.general).map(Self::Counter),
            SELECT..SELECTS_END => existing(SELECT, shape.general).map(Self::Select),
            FIXED..FIXED_END => existing(FIXED, shape.fixed).map(Self::Fixed),
            ALIAS..ALIASES_END => existing(ALIAS, shape.general).map(Self::Alias).and_then(newer),
            FIXED_CONTROL => Some(Self::FixedControl),
            STATUS => Some(Self::Status),
            CONTROL => Some(Self::Control),
            STATUS_CLEAR => Some(Self::StatusClear),
            STATUS_SET => newer(Self::StatusSet),
            IN_USE => newer(Self::InUse),
            CAPABILITIES => newer(Self::Capabilities),
            x86::DEBUGCTL => Some(Self::DebugControl),
            _ if x86::is_pmu_msr(msr) || x86::is_rdpmc(msr) => None,
            _ => return Self::Other,
        };
        found.unwrap_or(Self::Absent)
    }
}
