//! The PMU's registers by their MSR numbers.

use super::{K7_COUNTERS, Version};
use crate::x86;

/// A register of the PMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Register {
    /// `PERF_CTL` of this counter.
    Select(usize),
    /// `PERF_CTR` of this counter, by its MSR number or its RDPMC number.
    Counter(usize),
    /// `PerfCntrGlobalStatus`.
    Status,
    /// `PerfCntrGlobalCtl`.
    Control,
    /// `PerfCntrGlobalStatusClr`.
    StatusClear,
    /// `PerfCntrGlobalStatusSet`.
    StatusSet,
    /// A register of other PMUs, which this PMU does not have.
    Absent,
    /// Not a register of a PMU.
    Other,
}

const K7_SELECT: u32 = 0xc001_0000;
const K7_COUNTER: u32 = 0xc001_0004;
/// The first MSR of `PerfCtrExtCore`: `PERF_CTL0`. `PERF_CTR0` follows it, and then the pairs of the other counters.
pub const CORE: u32 = 0xc001_0200;
/// `PerfCntrGlobalStatus`.
pub const STATUS: u32 = 0xc000_0300;
/// `PerfCntrGlobalCtl`.
pub const CONTROL: u32 = 0xc000_0301;
/// `PerfCntrGlobalStatusClr`.
pub const STATUS_CLEAR: u32 = 0xc000_0302;
const STATUS_SET: u32 = 0xc000_0303;

impl Register {
    /// Returns the register with this MSR number.
    pub fn at(msr: u32, version: Version) -> Self {
        let existing = |base: u32, step: u32| {
            let counter = usize::try_from((msr - base) / step).ok()?;
            (counter < version.counters()).then_some(counter)
        };
        let found = match msr {
            0..x86::RDPMC_COUNTERS => existing(0, 1).map(Self::Counter),
            K7_SELECT..K7_COUNTER => existing(K7_SELECT, 1).map(Self::Select),
            K7_COUNTER..=0xc001_0007 => existing(K7_COUNTER, 1).map(Self::Counter),
            CORE..=0xc001_020b if version.has_core_msrs() => {
                let register = if (msr - CORE).is_multiple_of(2) { Self::Select } else { Self::Counter };
                existing(CORE, 2).map(register)
            }
            STATUS if version.has_global_registers() => Some(Self::Status),
            CONTROL if version.has_global_registers() => Some(Self::Control),
            STATUS_CLEAR if version.has_global_registers() => Some(Self::StatusClear),
            STATUS_SET if version.has_global_registers() => Some(Self::StatusSet),
            _ if x86::is_pmu_msr(msr) || x86::is_rdpmc(msr) => None,
            _ => return Self::Other,
        };
        found.unwrap_or(Self::Absent)
    }
}

const _: () = assert!(K7_COUNTERS == (K7_COUNTER - K7_SELECT) as usize);
