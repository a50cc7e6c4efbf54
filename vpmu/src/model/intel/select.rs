//! What the registers say that configure counters (SDM volume 3, 20.2.1.1 and 20.2.2). A write to a reserved bit faults.

use crate::event::Filter;
use crate::event_mapper::EventMapper;
use crate::model::select::{self, COUNTER_MASK, EDGE, ENABLE, INTERRUPT, INVERT, OS, UNIT_MASK, USER};
use crate::unit::CounterConfig;

const EVENT: u64 = 0xff;
/// Toggles a pin of the processor, which a guest has none of.
const PIN_CONTROL: u64 = 1 << 19;

/// What selects an event, rather than when it is counted.
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
    /// The bits that are not reserved. That for any thread of the core (21) came with version 3, and is gone in 5.
    pub const DEFINED: u64 = SELECTS | USER | OS | PIN_CONTROL | INTERRUPT | ENABLE;

    /// What a read gives.
    pub fn value(self) -> u64 {
        self.0
    }

    /// Whether an event is selected.
    pub fn is_in_use(self) -> bool {
        self.0 & EVENT != 0
    }

    /// Whether an overflow raises an interrupt.
    pub fn interrupts(self) -> bool {
        self.0 & INTERRUPT != 0
    }

    /// What its counter is told by it.
    pub fn config(self, mapper: &EventMapper) -> CounterConfig {
        select::config(self.0, select::selection(self.0, self.0 & SELECTS, mapper))
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
    /// The bits that are not reserved with so many fixed counters.
    pub fn defined(counters: usize) -> u64 {
        (0..counters)
            .fold(0, |bits, counter| bits | (FIXED_OS | FIXED_USER | FIXED_INTERRUPT) << (BITS * counter))
    }

    /// What a read gives.
    pub fn value(self) -> u64 {
        self.0
    }

    /// Whether the counter is on.
    pub fn is_in_use(self, counter: usize) -> bool {
        self.of(counter) & (FIXED_OS | FIXED_USER) != 0
    }

    /// Whether an overflow of the counter raises an interrupt.
    pub fn interrupts(self, counter: usize) -> bool {
        self.of(counter) & FIXED_INTERRUPT != 0
    }

    /// Where the counter counts, if it is on.
    pub fn filter(self, counter: usize) -> Option<Filter> {
        let bits = self.of(counter);
        Filter::of(bits & FIXED_USER != 0, bits & FIXED_OS != 0)
    }

    fn of(self, counter: usize) -> u64 {
        self.0 >> (BITS * counter) & 0xf
    }
}
