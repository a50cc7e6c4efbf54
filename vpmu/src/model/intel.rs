//! Intel's architectural PMU (SDM volume 3, chapter 20): version 2, and version 5 with full-width writes.
//!
//! In the unit, the general counters come first and the fixed counters follow. The registers and bits of PEBS, branch
//! records and Processor Trace are absent.

mod register;
mod select;

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

use super::Model;
use crate::event::{Event, GenericEvent};
use crate::event_mapper::EventMapper;
use crate::mask;
use crate::outcome::Outcome;
use crate::policy::Policy;
use crate::report::Report;
use crate::shared_page::{Counters, Registers, Slot, Stride};
use crate::source::Source;
use crate::state::{self, Mismatch, UnitState, check};
use crate::unit::{CounterConfig, Unit};
use crate::x86::{self, Leaf, Vendor};
use register::Register;
use select::{FixedControl, Select};

/// Width of the general and the fixed counters.
const WIDTH: u32 = 48;
/// Maximum number of general counters.
pub const MAX_GENERAL: usize = x86::RDPMC_COUNTERS as usize;
/// The events of the fixed counters, in their order.
pub const FIXED: [GenericEvent; 3] =
    [GenericEvent::Instructions, GenericEvent::Cycles, GenericEvent::ReferenceCycles];

/// Bit of the first fixed counter in the global registers.
const FIXED_BIT: u32 = 32;
/// `CTR_Frz` in the global status of version 5: all counters are frozen.
const FROZEN: u64 = 1 << 59;
/// `OvfDSBuffer` in the global status. It is never set, and clearing it does not fault.
const ALWAYS_CLEAR: u64 = 1 << 62;
/// `CondChgd` in the global status: the state of the PMU's hardware has changed. Here it means that counters have lost
/// their hardware or got it back. It raises no interrupt.
const CONDITION_CHANGED: u64 = 1 << 63;
/// `FW_WRITE` in `IA32_PERF_CAPABILITIES`: the full-width counter MSRs (`IA32_A_PMC`) exist.
const FULL_WIDTH_WRITES: u64 = 1 << 13;

/// Version of the architectural PMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Version {
    /// Global registers and fixed counters. A write to a general counter has 32 bits.
    V2,
    /// Adds full-width writes, bits of the global status that software can set, and a status bit for a freeze.
    V5,
}

impl Version {
    /// Returns its name in a saved state.
    fn name(self) -> &'static str {
        match self {
            Self::V2 => "v2",
            Self::V5 => "v5",
        }
    }
}

/// The PMU that the guest's CPUID announces.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// The version, which decides which registers exist.
    pub version: Version,
    /// Number of general counters.
    pub general: usize,
    /// Number of fixed counters: the first ones of [`FIXED`].
    pub fixed: usize,
    /// Mask of the [`ARCHITECTURAL_EVENTS`] that cannot be counted.
    pub absent: u32,
}

/// Encodings of the architectural events, in the order of their bits in CPUID.
pub const ARCHITECTURAL_EVENTS: [u64; 7] = [0x003c, 0x00c0, 0x013c, 0x4f2e, 0x412e, 0x00c4, 0x00c5];

impl Shape {
    /// The CPUID leaf that describes the PMU.
    pub const FUNCTION: u32 = 0xa;

    /// Adds the PMU to CPUID leaf `function`, from which [`x86::hide_pmu`] has removed every PMU.
    pub fn show(self, function: u32, leaf: &mut Leaf) {
        const PDCM: u32 = 1 << 15;
        const NO_ANY_THREAD: u32 = 1 << 15;
        let number = |counters: usize| u32::try_from(counters).unwrap_or(0);
        let events = number(ARCHITECTURAL_EVENTS.len());
        match (function, self.version) {
            (1, Version::V5) => leaf.ecx |= PDCM,
            (Self::FUNCTION, version) => {
                let (version, fixed_set, any_thread) = match version {
                    Version::V2 => (2, 0, 0),
                    Version::V5 => (5, (1 << self.fixed) - 1, NO_ANY_THREAD),
                };
                leaf.eax = version | number(self.general) << 8 | WIDTH << 16 | events << 24;
                leaf.ebx = self.absent;
                leaf.ecx = fixed_set;
                leaf.edx = number(self.fixed) | WIDTH << 5 | any_thread;
            }
            _ => {}
        }
    }

    /// Returns the registers that the guest can access on the shared page while all counters are frozen. Writes that
    /// would fault still leave the guest ([`Slot::write_mask`]).
    pub fn page_registers(self) -> Option<Registers> {
        let (general, fixed) = (u32::try_from(self.general).ok()?, u32::try_from(self.fixed).ok()?);
        let whole = (1 << WIDTH) - 1;
        let slot = |register, write_mask| Slot { register, write_mask, read_mask: write_mask, counter: None };
        let counter = |counter| Slot {
            counter: usize::try_from(counter).ok(),
            ..match self.version {
                // `IA32_PMC` ignores the upper half of what is written, so every write but that of 0 leaves the guest.
                Version::V2 => slot(register::COUNTER + counter, 0),
                Version::V5 => slot(register::ALIAS + counter, whole),
            }
        };
        let selects = (0..general).map(|counter| slot(register::SELECT + counter, Select::DEFINED));
        let fixed_counter = |counter| Slot {
            write_mask: u64::MAX,
            counter: usize::try_from(counter).ok().map(|counter| self.general + counter),
            ..slot(register::FIXED + counter, whole)
        };
        let fixed_control = slot(register::FIXED_CONTROL, FixedControl::defined(self.fixed));
        Some(Registers {
            control: register::CONTROL,
            status: register::STATUS,
            clear: slot(register::STATUS_CLEAR, self.mask() | ALWAYS_CLEAR | CONDITION_CHANGED),
            slots: selects
                .chain((0..general).map(counter))
                .chain((0..fixed).map(fixed_counter))
                .chain([fixed_control])
                .collect(),
            counters: vec![
                Counters { first: 0, count: general, slot: general, stride: Stride::One },
                Counters { first: x86::RDPMC_FIXED, count: fixed, slot: 2 * general, stride: Stride::One },
            ],
        })
    }

    fn counters(self) -> usize {
        self.general + self.fixed
    }

    /// Returns the bits of all counters in the global registers.
    fn mask(self) -> u64 {
        self.bits(mask::first(self.counters()))
    }

    /// Converts a counter mask of the unit to the bits of the global registers.
    fn bits(self, counters: u64) -> u64 {
        counters & mask::first(self.general) | counters >> self.general << FIXED_BIT
    }

    /// Converts bits of the global registers to a counter mask of the unit.
    fn counters_of(self, bits: u64) -> u64 {
        bits & mask::first(self.general) | (bits >> FIXED_BIT & mask::first(self.fixed)) << self.general
    }
}

/// Intel's PMU of one vCPU.
pub(crate) struct Intel<S: Source> {
    shape: Shape,
    mapper: EventMapper,
    unit: Unit<S>,
    selects: Vec<Select>,
    fixed_control: FixedControl,
    /// Configurations of the fixed counters. A disabled one keeps its last selection, so that its backing event can
    /// stay.
    fixed: Vec<CounterConfig>,
    debug_control: u64,
}

impl<S: Source> Intel<S> {
    /// Creates the PMU in its reset state, on a host of vendor `host`. Global control then enables the general
    /// counters, for software that does not know it.
    pub fn new(shape: Shape, host: Vendor, source: S) -> Self {
        let mut unit = Unit::with_companions(source, shape.counters(), WIDTH);
        unit.set_control(mask::first(shape.general));
        Self {
            shape,
            mapper: EventMapper::new(Vendor::Intel, host, Policy::default()),
            unit,
            selects: vec![Select::default(); shape.general],
            fixed_control: FixedControl::default(),
            fixed: vec![CounterConfig::default(); shape.fixed],
            debug_control: 0,
        }
    }

    /// Returns global control. Before version 5, a freeze clears it.
    fn control(&self) -> u64 {
        match self.shape.version {
            Version::V2 if self.unit.is_frozen() => 0,
            _ => self.shape.bits(self.unit.control()),
        }
    }

    fn set_control(&mut self, bits: u64) {
        let counters = self.shape.counters_of(bits);
        if self.shape.version == Version::V2 && self.unit.is_frozen() {
            self.unit.set_control(0);
            self.unit.set_frozen(false);
        }
        self.unit.set_control(counters);
    }

    fn status(&mut self) -> u64 {
        let status = self.unit.status();
        let frozen = if self.has_frozen_bit() && self.unit.is_frozen() { FROZEN } else { 0 };
        let changed = if self.unit.bank.hardware().changed() { CONDITION_CHANGED } else { 0 };
        self.shape.bits(status) | frozen | changed
    }

    fn clear_status(&mut self, bits: u64) {
        self.unit.clear_status(self.shape.counters_of(bits));
        if bits & FROZEN != 0 {
            self.unit.set_frozen(false);
        }
        if bits & CONDITION_CHANGED != 0 {
            self.unit.bank.hardware().set_changed(false);
        }
    }

    fn set_status(&mut self, bits: u64) {
        self.unit.set_status(self.shape.counters_of(bits));
        if bits & FROZEN != 0 {
            self.unit.set_frozen(true);
        }
    }

    fn has_frozen_bit(&self) -> bool {
        self.shape.version == Version::V5
    }

    /// Returns the bits of the global status that software can set.
    fn status_mask(&self) -> u64 {
        self.shape.mask() | if self.has_frozen_bit() { FROZEN } else { 0 }
    }

    /// Returns `IA32_PERF_GLOBAL_INUSE`: the counters that are configured, and whether one of them interrupts.
    fn in_use(&self) -> u64 {
        /// `PMI_InUse`.
        const INTERRUPT: u64 = 1 << 63;
        let selects = (0..).zip(&self.selects);
        let general =
            selects.fold(0, |set, (counter, select)| set | u64::from(select.is_in_use()) << counter);
        let fixed = (0..self.shape.fixed)
            .fold(0, |set, counter| set | u64::from(self.fixed_control.is_in_use(counter)) << counter);
        let interrupts = self.selects.iter().any(|select| select.interrupts())
            || (0..self.shape.fixed).any(|counter| self.fixed_control.interrupts(counter));
        general | fixed << FIXED_BIT | if interrupts { INTERRUPT } else { 0 }
    }

    fn select(&mut self, counter: usize, select: Select) {
        self.selects[counter] = select;
        self.unit.configure(counter, select.config(&self.mapper));
    }

    fn control_fixed(&mut self, control: FixedControl) {
        self.fixed_control = control;
        for (counter, generic) in FIXED.into_iter().enumerate().take(self.shape.fixed) {
            let before = self.fixed[counter];
            let filter = control.filter(counter);
            let selection = filter.map(|filter| self.mapper.fixed(generic, filter));
            let config = CounterConfig {
                selection: selection.or(before.selection),
                enabled: selection.is_some(),
                interrupts: control.interrupts(counter),
                branches: None,
            };
            if config != before {
                self.fixed[counter] = config;
                self.unit.configure(self.shape.general + counter, config);
            }
        }
    }
}

impl<S: Source> Model<S> for Intel<S> {
    /// Reads an MSR, or a counter by its RDPMC number: the loader changes a kernel's RDPMC into RDMSR.
    fn read(&mut self, msr: u32) -> Outcome {
        Outcome::Value(match Register::at(msr, self.shape) {
            Register::Select(counter) => self.selects[counter].value(),
            Register::Counter(counter) | Register::Alias(counter) | Register::Rdpmc(counter) => {
                self.unit.read(counter)
            }
            Register::Fixed(counter) => self.unit.read(self.shape.general + counter),
            Register::FixedControl => self.fixed_control.value(),
            Register::Status => self.status(),
            Register::Control => self.control(),
            Register::StatusClear | Register::StatusSet => 0,
            Register::InUse => self.in_use(),
            Register::Capabilities => FULL_WIDTH_WRITES,
            Register::DebugControl => self.debug_control,
            Register::Absent => return Outcome::Fault,
            Register::Other => return Outcome::NotHandled,
        })
    }

    fn write(&mut self, msr: u32, value: u64) -> Outcome {
        let fits = |mask: u64| value & !mask == 0;
        match Register::at(msr, self.shape) {
            Register::Select(counter) if fits(Select::DEFINED) => self.select(counter, Select::from(value)),
            Register::Counter(counter) => self.unit.write(counter, sign_extended(value)),
            Register::Alias(counter) if fits((1 << WIDTH) - 1) => self.unit.write(counter, value),
            Register::Fixed(counter) => self.unit.write(self.shape.general + counter, value),
            Register::FixedControl if fits(FixedControl::defined(self.shape.fixed)) => {
                self.control_fixed(FixedControl::from(value));
            }
            Register::Control if fits(self.shape.mask()) => self.set_control(value),
            Register::StatusClear if fits(self.status_mask() | ALWAYS_CLEAR | CONDITION_CHANGED) => {
                self.clear_status(value);
            }
            Register::StatusSet if fits(self.status_mask()) => self.set_status(value),
            Register::DebugControl if fits(x86::FREEZE_PERFMON_ON_PMI) => {
                self.debug_control = value;
                self.unit.set_freeze_on_pmi(value != 0);
            }
            Register::Other => return Outcome::NotHandled,
            _ => return Outcome::Fault,
        }
        Outcome::Handled
    }

    fn set_policy(&mut self, policy: &Policy) {
        self.mapper.set_policy(policy);
        // First the events, so that no denied one is started anew.
        for (counter, select) in self.selects.iter().enumerate() {
            self.unit.replace_event(counter, select.config(&self.mapper));
        }
        // A disabled fixed counter must not keep a selection that the new policy denies.
        for (counter, config) in self.fixed.iter_mut().enumerate() {
            let filter = self.fixed_control.filter(counter);
            config.selection = filter.map(|filter| self.mapper.fixed(FIXED[counter], filter));
            self.unit.replace_event(self.shape.general + counter, *config);
        }
        self.unit.set_policy(policy);
    }

    fn instruction_events(&self) -> &'static [Event] {
        &x86::INSTRUCTIONS
    }

    fn save(&mut self) -> state::Registers {
        state::Registers::Intel {
            version: self.shape.version.name().to_owned(),
            selects: self.selects.iter().map(|select| select.value()).collect(),
            fixed_control: self.fixed_control.value(),
            debug_control: self.debug_control,
            hardware_changed: self.unit.bank.hardware().changed(),
        }
    }

    fn check(&self, registers: &state::Registers) -> Result<(), Mismatch> {
        let state::Registers::Intel { version, selects, fixed_control, debug_control, .. } = registers else {
            return Err(Mismatch::Shape);
        };
        if version != self.shape.version.name() || selects.len() != self.selects.len() {
            return Err(Mismatch::Shape);
        }
        check(selects.iter().all(|select| select & !Select::DEFINED == 0), "event selects")?;
        check(fixed_control & !FixedControl::defined(self.shape.fixed) == 0, "fixed control")?;
        check(debug_control & !x86::FREEZE_PERFMON_ON_PMI == 0, "debug control")
    }

    fn restore(&mut self, registers: &state::Registers, unit: &UnitState) {
        let state::Registers::Intel { selects, fixed_control, debug_control, hardware_changed, .. } =
            registers
        else {
            return;
        };
        self.unit.halt();
        for (counter, select) in selects.iter().enumerate() {
            self.select(counter, Select::from(*select));
        }
        self.control_fixed(FixedControl::from(*fixed_control));
        self.debug_control = *debug_control;
        self.unit.set_freeze_on_pmi(*debug_control != 0);
        self.unit.bank.hardware().set_changed(*hardware_changed);
        self.unit.resume(unit);
    }

    fn inexact(&self) -> &'static [Event] {
        &x86::INTEL_CYCLES
    }

    fn unit(&mut self) -> &mut Unit<S> {
        &mut self.unit
    }

    fn report(&mut self) -> Report {
        let translation = self.mapper.translation();
        self.unit.report(|selection| translation.describe(selection))
    }
}

/// Returns the counter value that a write to `IA32_PMC` sets: the lower half, sign-extended.
fn sign_extended(value: u64) -> u64 {
    #[expect(clippy::cast_possible_truncation, reason = "the upper half is ignored")]
    let low = value as u32;
    i64::from(low.cast_signed()).cast_unsigned()
}
