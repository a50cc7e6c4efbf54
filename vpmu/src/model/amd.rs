//! AMD's PMUs: the four counters of the K7, the six of `PerfCtrExtCore`, and PerfMonV2 with its global registers (APM
//! volume 2, section 13.2).
//!
//! The older PMUs are the newest one without some of its registers, so there is one model for all.

mod register;
mod select;

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

use super::Model;
use crate::event::Event;
use crate::event_mapper::EventMapper;
use crate::outcome::Outcome;
use crate::policy::Policy;
use crate::report::Report;
use crate::shared_page::{Counters, Registers, Slot, Stride};
use crate::source::Source;
use crate::state::{self, Mismatch, UnitState, check};
use crate::unit::Unit;
use crate::x86::{self, Leaf, Vendor};
use register::Register;
use select::Select;

/// Width of a counter. The manual asks software to write zeros to the bits above; the hardware ignores them.
const WIDTH: u32 = 48;
/// Maximum number of core counters.
pub const MAX_COUNTERS: usize = 6;
const _: () = assert!(MAX_COUNTERS <= x86::RDPMC_COUNTERS as usize);
/// Number of counters of the K7, which have no CPUID bit.
pub const K7_COUNTERS: usize = 4;

/// The PMU that the guest's CPUID announces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Version {
    /// The four counters that every processor since the K7 has, without a CPUID bit.
    K7,
    /// `PerfCtrExtCore`: six counters with MSRs of their own. The first four also have the K7's MSRs.
    Core,
    /// PerfMonV2 with this number of counters: as `PerfCtrExtCore`, with global control and status.
    V2(usize),
}

impl Version {
    /// Returns the number of counters.
    pub fn counters(self) -> usize {
        match self {
            Self::K7 => K7_COUNTERS,
            Self::Core => MAX_COUNTERS,
            Self::V2(counters) => counters,
        }
    }

    /// Returns its name in a saved state.
    fn name(self) -> &'static str {
        match self {
            Self::K7 => "k7",
            Self::Core => "core",
            Self::V2(_) => "v2",
        }
    }

    /// Returns whether it has the MSRs of `PerfCtrExtCore`.
    fn has_core_msrs(self) -> bool {
        self != Self::K7
    }

    fn has_global_registers(self) -> bool {
        matches!(self, Self::V2(_))
    }

    /// Adds the PMU to CPUID leaf `function`, from which [`x86::hide_pmu`] has removed every PMU. The guest's highest
    /// extended leaf must be at least [`Self::LAST_FUNCTION`].
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

    /// Returns the registers that the guest can access on the shared page while all counters are frozen. Returns `None`
    /// for a version that cannot freeze all counters. Writes to these registers never fault.
    pub fn page_registers(self) -> Option<Registers> {
        let Self::V2(counters) = self else { return None };
        let count = u32::try_from(counters).ok()?;
        let slot = |register, read_mask| Slot { register, write_mask: u64::MAX, read_mask, counter: None };
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

    /// The highest CPUID leaf that [`Self::show`] changes.
    pub const LAST_FUNCTION: u32 = 0x8000_0022;
}

/// AMD's PMU of one vCPU.
pub(crate) struct Amd<S: Source> {
    version: Version,
    mapper: EventMapper,
    unit: Unit<S>,
    selects: Vec<Select>,
}

impl<S: Source> Amd<S> {
    /// Creates the PMU in its reset state, on a host of vendor `host`. Global control then enables all counters, for
    /// software that does not know it.
    pub fn new(version: Version, host: Vendor, source: S) -> Self {
        let counters = version.counters();
        Self {
            version,
            mapper: EventMapper::new(Vendor::Amd, host, Policy::default()),
            unit: Unit::with_companions(source, counters, WIDTH),
            selects: vec![Select::default(); counters],
        }
    }

    fn select(&mut self, counter: usize, select: Select) {
        self.selects[counter] = select;
        self.unit.configure(counter, select.config(&self.mapper));
    }
}

impl<S: Source> Model<S> for Amd<S> {
    /// Reads an MSR, or a counter by its RDPMC number: the loader changes a kernel's RDPMC into RDMSR.
    fn read(&mut self, msr: u32) -> Outcome {
        Outcome::Value(match Register::at(msr, self.version) {
            Register::Select(counter) => self.selects[counter].value(),
            Register::Counter(counter) => self.unit.read(counter),
            Register::Status => self.unit.status(),
            Register::Control => self.unit.control(),
            Register::StatusClear | Register::StatusSet => 0,
            Register::Absent => return Outcome::Fault,
            Register::Other => return Outcome::NotHandled,
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
            Register::Other => return Outcome::NotHandled,
        }
        Outcome::Handled
    }

    fn set_policy(&mut self, policy: &Policy) {
        self.mapper.set_policy(policy);
        // First the events, so that no denied one is started anew.
        for (counter, select) in self.selects.iter().enumerate() {
            self.unit.replace_event(counter, select.config(&self.mapper));
        }
        self.unit.set_policy(policy);
    }

    fn instruction_events(&self) -> &'static [Event] {
        &x86::INSTRUCTIONS
    }

    fn save(&mut self) -> state::Registers {
        let selects = self.selects.iter().map(|select| select.value()).collect();
        state::Registers::Amd { version: self.version.name().to_owned(), selects }
    }

    fn check(&self, registers: &state::Registers) -> Result<(), Mismatch> {
        let state::Registers::Amd { version, selects } = registers else { return Err(Mismatch::Shape) };
        if version != self.version.name() || selects.len() != self.selects.len() {
            return Err(Mismatch::Shape);
        }
        check(selects.iter().all(|select| select & !Select::DEFINED == 0), "event selects")
    }

    fn restore(&mut self, registers: &state::Registers, unit: &UnitState) {
        let state::Registers::Amd { selects, .. } = registers else { return };
        self.unit.halt();
        for (counter, select) in selects.iter().enumerate() {
            self.select(counter, Select::from(*select));
        }
        self.unit.resume(unit);
    }

    fn inexact(&self) -> &'static [Event] {
        &x86::AMD_CYCLES
    }

    fn unit(&mut self) -> &mut Unit<S> {
        &mut self.unit
    }

    fn report(&mut self) -> Report {
        let translation = self.mapper.translation();
        self.unit.report(|selection| translation.describe(selection))
    }
}
