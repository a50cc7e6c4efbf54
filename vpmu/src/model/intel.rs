//! Intel's architectural PMU (SDM volume 3, chapter 20): version 2, and version 5 with writes of whole counters.
//!
//! General counters come first in the unit, fixed ones after them. What sampling by the processor itself (PEBS, branch
//! records, Processor Trace) has among these registers is absent.

mod register;
mod select;

#[cfg(test)]
mod tests;

use super::Model;
use crate::Outcome;
use crate::event::Meaning;
use crate::event_mapper::EventMapper;
use crate::mask;
use crate::policy::Policy;
use crate::report::Report;
use crate::shared_page::{Counters, Registers, Slot, Stride};
use crate::source::Source;
use crate::unit::{CounterConfig, Unit};
use crate::x86::{self, Leaf, Vendor};
use register::Register;
use select::{FixedControl, Select};

/// Of general and of fixed counters.
const WIDTH: u32 = 48;
/// There can be no more general counters than these.
pub const MOST_GENERAL: usize = x86::RDPMC_COUNTERS as usize;
/// What the fixed counters count, in their order.
pub const FIXED: [Meaning; 3] = [Meaning::Instructions, Meaning::Cycles, Meaning::ReferenceCycles];

/// Where the global registers have the fixed counters.
const FIXED_BIT: u32 = 32;
/// "`CTR_Frz`" in the global status of version 5: all counters stand still.
const FROZEN: u64 = 1 << 59;
/// "`OvfDSBuffer`": never set, and may be cleared by everybody.
const ALWAYS_CLEAR: u64 = 1 << 62;
/// "`CondChgd`": the state of the PMU's hardware has changed. Here counters have lost theirs, or got it back. It interrupts nobody.
const CONDITION_CHANGED: u64 = 1 << 63;
/// In `IA32_PERF_CAPABILITIES`: "`FW_WRITE`", by which whole counters can be written.
const FULL_WIDTH_WRITES: u64 = 1 << 13;

/// Which of the versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// Global registers and fixed counters; 32 bits of a general counter can be written.
    V2,
    /// Whole counters can be written, the status can be set, and a PMU that has frozen says so.
    V5,
}

/// What the guest's CPUID says of its counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Which registers there are.
    pub version: Version,
    /// How many general counters.
    pub general: usize,
    /// How many of [`FIXED`].
    pub fixed: usize,
    /// A bit for each of [`ARCHITECTURAL_EVENTS`] that cannot be counted.
    pub absent: u32,
}

/// The architectural events, in the order in which CPUID tells of them.
pub const ARCHITECTURAL_EVENTS: [u64; 7] = [0x003c, 0x00c0, 0x013c, 0x4f2e, 0x412e, 0x00c4, 0x00c5];

impl Shape {
    /// The CPUID function that tells of it.
    pub const FUNCTION: u32 = 0xa;

    /// Puts it into what CPUID says at `function`, out of which every PMU was taken.
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

    /// The registers whose accesses can wait while the counters are frozen. A write that would fault cannot, nor can one
    /// that thaws them.
    pub fn page_registers(self) -> Option<Registers> {
        let (general, fixed) = (u32::try_from(self.general).ok()?, u32::try_from(self.fixed).ok()?);
        let whole = (1 << WIDTH) - 1;
        let slot = |register, accepts| Slot { register, accepts, keeps: accepts, counter: None };
        let counter = |counter| Slot {
            counter: usize::try_from(counter).ok(),
            ..match self.version {
                // Of what is written there only the lower half counts.
                Version::V2 => slot(register::COUNTER + counter, 0),
                Version::V5 => slot(register::ALIAS + counter, whole),
            }
        };
        let selects = (0..general).map(|counter| slot(register::SELECT + counter, Select::DEFINED));
        let fixed_counter = |counter| Slot {
            accepts: u64::MAX,
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

    /// All counters, as the global registers have them.
    fn mask(self) -> u64 {
        self.bits(mask::first(self.counters()))
    }

    /// A set of counters as the global registers have it.
    fn bits(self, counters: u64) -> u64 {
        counters & mask::first(self.general) | counters >> self.general << FIXED_BIT
    }

    /// What the global registers have as a set of counters.
    fn counters_of(self, bits: u64) -> u64 {
        bits & mask::first(self.general) | (bits >> FIXED_BIT & mask::first(self.fixed)) << self.general
    }
}

/// One vCPU's PMU.
pub struct Intel<S: Source> {
    shape: Shape,
    mapper: EventMapper,
    unit: Unit<S>,
    selects: Vec<Select>,
    fixed_control: FixedControl,
    /// What the fixed counters are told by it. One that is off goes on to select what it did when it was on, so that what
    /// counts for it can stay.
    fixed: Vec<CounterConfig>,
    debug_control: u64,
}

impl<S: Source> Intel<S> {
    /// The PMU after reset, on a host of that vendor. Global control then has the general counters on, for those who do not
    /// know it.
    pub fn new(shape: Shape, host: Vendor, source: S) -> Self {
        let mut unit = Unit::new(source, shape.counters(), WIDTH);
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

    /// Before version 5 a freeze is that global control becomes 0.
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
        let changed = if self.unit.hardware_changed() { CONDITION_CHANGED } else { 0 };
        self.shape.bits(status) | frozen | changed
    }

    fn clear_status(&mut self, bits: u64) {
        self.unit.clear_status(self.shape.counters_of(bits));
        if bits & FROZEN != 0 {
            self.unit.set_frozen(false);
        }
        if bits & CONDITION_CHANGED != 0 {
            self.unit.forget_hardware_changed();
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

    /// The bits of the status that can be set.
    fn status_mask(&self) -> u64 {
        self.shape.mask() | if self.has_frozen_bit() { FROZEN } else { 0 }
    }

    /// Which counters somebody has a use for, and in the highest bit, whether somebody has for the interrupt.
    fn in_use(&self) -> u64 {
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
        for (counter, meaning) in FIXED.into_iter().enumerate().take(self.shape.fixed) {
            let before = self.fixed[counter];
            let filter = control.filter(counter);
            let selection = filter.map(|filter| self.mapper.fixed(meaning, filter));
            let config = CounterConfig {
                selection: selection.or(before.selection),
                enabled: selection.is_some(),
                interrupts: control.interrupts(counter),
            };
            if config != before {
                self.fixed[counter] = config;
                self.unit.configure(self.shape.general + counter, config);
            }
        }
    }
}

impl<S: Source> Model<S> for Intel<S> {
    /// RDPMC, too, which the loader has made an RDMSR of the counter's number.
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
            Register::Other => return Outcome::NotMine,
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
            Register::DebugControl if fits(x86::FREEZE_AT_INTERRUPTS) => {
                self.debug_control = value;
                self.unit.freeze_at_interrupts(value != 0);
            }
            Register::Other => return Outcome::NotMine,
            _ => return Outcome::Fault,
        }
        Outcome::Handled
    }

    fn set_policy(&mut self, policy: &Policy) {
        self.mapper.set_policy(policy);
        self.unit.set_policy(policy);
        for (counter, select) in self.selects.iter().enumerate() {
            self.unit.select(counter, select.config(&self.mapper).selection);
        }
        // Fixed counters that are off are to select nothing that is denied now.
        for (counter, config) in self.fixed.iter_mut().enumerate() {
            let filter = self.fixed_control.filter(counter);
            config.selection = filter.map(|filter| self.mapper.fixed(FIXED[counter], filter));
            self.unit.select(self.shape.general + counter, config.selection);
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

/// What a write of the lower half makes of a counter.
fn sign_extended(value: u64) -> u64 {
    #[expect(clippy::cast_possible_truncation, reason = "the upper half is ignored")]
    let low = value as u32;
    i64::from(low.cast_signed()).cast_unsigned()
}
