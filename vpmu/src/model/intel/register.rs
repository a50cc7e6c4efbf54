//! Which register an MSR number is.

use super::{Shape, Version};
use crate::x86;

/// A register of the PMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Register {
    /// `IA32_PERFEVTSEL`.
    Select(usize),
    /// `IA32_PMC`, of which 32 bits are written.
    Counter(usize),
    /// `IA32_A_PMC`: the same, of which all are.
    Alias(usize),
    /// `IA32_FIXED_CTR`.
    Fixed(usize),
    /// A counter of the unit, by its number for RDPMC.
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
    /// What of `IA32_DEBUGCTL` is the PMU's.
    DebugControl,
    /// One of a PMU, but not of this one.
    Absent,
    /// None of a PMU.
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
    /// The register with this number.
    pub fn at(msr: u32, shape: Shape) -> Self {
        let one_of = |base: u32, counters: usize| {
            let counter = usize::try_from(msr - base).ok()?;
            (counter < counters).then_some(counter)
        };
        let newer = |register| (shape.version == Version::V5).then_some(register);
        let found = match msr {
            0..x86::RDPMC_COUNTERS => one_of(0, shape.general).map(Self::Rdpmc),
            x86::RDPMC_FIXED..RDPMC_FIXED_END => {
                one_of(x86::RDPMC_FIXED, shape.fixed).map(|counter| Self::Rdpmc(shape.general + counter))
            }
            COUNTER..COUNTERS_END => one_of(COUNTER, shape.general).map(Self::Counter),
            SELECT..SELECTS_END => one_of(SELECT, shape.general).map(Self::Select),
            FIXED..FIXED_END => one_of(FIXED, shape.fixed).map(Self::Fixed),
            ALIAS..ALIASES_END => one_of(ALIAS, shape.general).map(Self::Alias).and_then(newer),
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
