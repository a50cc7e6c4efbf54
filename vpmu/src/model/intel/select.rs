//! The registers that configure counters (SDM volume 3, 20.2.1.1 and 20.2.2). A write to a reserved bit faults.

use crate::event::Filter;
use crate::event_mapper::EventMapper;
use crate::model::select::{self, COUNTER_MASK, EDGE, ENABLE, INTERRUPT, INVERT, OS, UNIT_MASK, USER};
use crate::unit::CounterConfig;

const EVENT: u64 = 0xff;
/// Toggles a pin of the processor at each event. A guest has no such pin, so the bit is kept and has no effect.
const PIN_CONTROL: u64 = 1 << 19;

/// The bits that select the event. The other bits say when it is counted.
const SELECTS: u64 = EVENT | UNIT_MASK | EDGE | INVERT | COUNTER_MASK;

/// `IA32_PERFEVTSEL`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Select(u64);

impl From<u64> for Select {
    fn from(value: u64) -> Self {
        Self(value & Self::DEFINED)
    }
}

impl Select {
    /// The bits that are not reserved. `AnyThread` (21) came with version 3 and is gone in version 5.
    pub const DEFINED: u64 = SELECTS | USER | OS | PIN_CONTROL | INTERRUPT | ENABLE;

    /// Returns the value that a read returns.
    pub fn value(self) -> u64 {
        self.0
    }

    /// Returns whether an event is selected.
    pub fn is_in_use(self) -> bool {
        self.0 & EVENT != 0
    }

    /// Returns whether an overflow interrupts.
    pub fn interrupts(self) -> bool {
        self.0 & INTERRUPT != 0
    }

    /// Returns the configuration of the register's counter.
    pub fn config(self, mapper: &EventMapper) -> CounterConfig {
        let code = self.0 & SELECTS;
        select::config(self.0, code, select::selection(self.0, code, mapper))
    }
}

/// `IA32_FIXED_CTR_CTRL`: four bits for each fixed counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FixedControl(u64);

const FIXED_OS: u64 = 1 << 0;
const FIXED_USER: u64 = 1 << 1;
const FIXED_INTERRUPT: u64 = 1 << 3;
const BITS: usize = 4;

impl From<u64> for FixedControl {
    fn from(value: u64) -> Self {
        Self(value)
    }
}

impl FixedControl {
    /// Returns the bits that are not reserved in a PMU with this number of fixed counters.
    pub fn defined(counters: usize) -> u64 {
        (0..counters)
            .fold(0, |bits, counter| bits | (FIXED_OS | FIXED_USER | FIXED_INTERRUPT) << (BITS * counter))
    }

    /// Returns the value that a read returns.
    pub fn value(self) -> u64 {
        self.0
    }

    /// Returns whether a counter is enabled.
    pub fn is_in_use(self, counter: usize) -> bool {
        self.field(counter) & (FIXED_OS | FIXED_USER) != 0
    }

    /// Returns whether an overflow of a counter interrupts.
    pub fn interrupts(self, counter: usize) -> bool {
        self.field(counter) & FIXED_INTERRUPT != 0
    }

    /// Returns the privilege levels at which a counter counts, if it is enabled.
    pub fn filter(self, counter: usize) -> Option<Filter> {
        let bits = self.field(counter);
        Filter::of(bits & FIXED_USER != 0, bits & FIXED_OS != 0)
    }

    fn field(self, counter: usize) -> u64 {
        self.0 >> (BITS * counter) & 0xf
    }
}
