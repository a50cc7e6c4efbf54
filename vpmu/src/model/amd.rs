//! AMD's PMUs: the four counters of the K7, the six of `PerfCtrExtCore`, and those with PerfMonV2's global registers (APM
//! volume 2, section 13.2).
//!
//! The older ones are the newest with something missing, so there is one model.

mod register;
mod select;

#[cfg(test)]
mod tests;

use super::Model;
use crate::Outcome;
use crate::event_mapper::EventMapper;
use crate::policy::Policy;
use crate::report::Report;
use crate::shared_page::{Counters, Registers, Slot, Stride};
use crate::source::Source;
use crate::unit::Unit;
use crate::x86::{self, Leaf, Vendor};
use register::Register;
use select::Select;

/// Counters have 48 bits; the manual has software write zeroes above them, and the hardware ignores what it writes.
const WIDTH: u32 = 48;
/// There can be no more core counters than these.
pub const MOST_COUNTERS: usize = 6;
const _: () = assert!(MOST_COUNTERS <= x86::RDPMC_COUNTERS as usize);
/// What was there before there was a CPUID bit for it.
pub const K7_COUNTERS: usize = 4;

/// What the guest's CPUID says of its counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// Nothing: the four counters that every processor since the K7 has.
    K7,
    /// `PerfCtrExtCore`: six, at addresses of their own; the first four also at the K7's.
    Core,
    /// PerfMonV2 with so many counters: global control and status beside them.
    V2(usize),
}

impl Version {
    /// How many counters it has.
    pub fn counters(self) -> usize {
        match self {
            Self::K7 => K7_COUNTERS,
            Self::Core => MOST_COUNTERS,
            Self::V2(counters) => counters,
        }
    }

    /// Whether it has the addresses of `PerfCtrExtCore`.
    fn has_core_addresses(self) -> bool {
        self != Self::K7
    }

    fn has_global_registers(self) -> bool {
        matches!(self, Self::V2(_))
    }

    /// Puts it into what CPUID says at `function`, out of which every PMU was taken. The highest extended function must
    /// be at least [`Self::LAST_FUNCTION`].
    pub fn show(self, function: u32, leaf: &mut Leaf) {
        const PERF_CTR_EXT_CORE: u32 = 1 << 23;
        const PERF_MON_V2: u32 = 1;
        match (function, self) {
            (0x8000_0001, Self::Core | Self::V2(_)) => leaf.ecx |= PERF_CTR_EXT_CORE,
            (Self::LAST_FUNCTION, Self::V2(counters)) => {
                leaf.eax |= PERF_MON_V2;
                // Bits 3..0: the number of core counters.
                leaf.ebx |= u32::try_from(counters).unwrap_or(0) & 0xf;
            }
            _ => {}
        }
    }

    /// The registers whose accesses can wait while the counters are frozen, if they can be. None of these writes faults.
    pub fn page_registers(self) -> Option<Registers> {
        let Self::V2(counters) = self else { return None };
        let count = u32::try_from(counters).ok()?;
        let slot = |register, keeps| Slot { register, accepts: u64::MAX, keeps, counter: None };
        let pair = |counter| {
            let select = register::CORE + 2 * counter;
            let value = slot(select + 1, (1 << WIDTH) - 1);
            [slot(select, Select::DEFINED), Slot { counter: usize::try_from(counter).ok(), ..value }]
        };
        Some(Registers {
            control: register::CONTROL,
            status: register::STATUS,
            clear: slot(register::STATUS_CLEAR, 0),
            slots: (0..count).flat_map(pair).collect(),
            counters: vec![Counters { first: 0, count, slot: 1, stride: Stride::Two }],
        })
    }

    /// The last CPUID function in which there is something to show.
    pub const LAST_FUNCTION: u32 = 0x8000_0022;
}

/// One vCPU's PMU.
pub struct Amd<S: Source> {
    version: Version,
    mapper: EventMapper,
    unit: Unit<S>,
    selects: Vec<Select>,
}

impl<S: Source> Amd<S> {
    /// The PMU after reset, on a host of that vendor. Global control then has all counters on, for those who do not know it.
    pub fn new(version: Version, host: Vendor, source: S) -> Self {
        let counters = version.counters();
        Self {
            version,
            mapper: EventMapper::new(Vendor::Amd, host, Policy::default()),
            unit: Unit::new(source, counters, WIDTH),
            selects: vec![Select::default(); counters],
        }
    }

    fn select(&mut self, counter: usize, select: Select) {
        self.selects[counter] = select;
        self.unit.configure(counter, select.config(&self.mapper));
    }
}

impl<S: Source> Model<S> for Amd<S> {
    /// RDPMC, too, which the loader has made an RDMSR of the counter's number.
    fn read(&mut self, msr: u32) -> Outcome {
        Outcome::Value(match Register::at(msr, self.version) {
            Register::Select(counter) => self.selects[counter].value(),
            Register::Counter(counter) => self.unit.read(counter),
            Register::Status => self.unit.status(),
            Register::Control => self.unit.control(),
            Register::StatusClear | Register::StatusSet => 0,
            Register::Absent => return Outcome::Fault,
            Register::Other => return Outcome::NotMine,
        })
    }

    fn write(&mut self, msr: u32, value: u64) -> Outcome {
        match Register::at(msr, self.version) {
            Register::Select(counter) => self.select(counter, Select::from(value)),
            Register::Counter(counter) => self.unit.write(counter, value),
            Register::Control => self.unit.set_control(value),
            Register::StatusClear => self.unit.clear_status(value),
            Register::StatusSet => self.unit.set_status(value),
            Register::Status | Register::Absent => return Outcome::Fault,
            Register::Other => return Outcome::NotMine,
        }
        Outcome::Handled
    }

    fn set_policy(&mut self, policy: &Policy) {
        self.mapper.set_policy(policy);
        self.unit.set_policy(policy);
        for (counter, select) in self.selects.iter().enumerate() {
            self.unit.select(counter, select.config(&self.mapper).selection);
        }
    }

    fn unit(&mut self) -> &mut Unit<S> {
        &mut self.unit
    }

    fn report(&mut self) -> Report {
        let translation = self.mapper.translation();
        self.unit.report(|selection| translation.describe(selection))
    }
}
