//! The bits that the event select registers of AMD and Intel share. Both go back to the Pentium Pro.

use crate::event::{Filter, Selection};
use crate::event_mapper::EventMapper;
use crate::unit::CounterConfig;

/// The unit mask.
pub const UNIT_MASK: u64 = 0xff << 8;
/// Counts in user mode.
pub const USER: u64 = 1 << 16;
/// Counts in the kernel.
pub const OS: u64 = 1 << 17;
/// Counts how often the event begins (edge detect).
pub const EDGE: u64 = 1 << 18;
/// An overflow interrupts.
pub const INTERRUPT: u64 = 1 << 20;
/// Enables the counter.
pub const ENABLE: u64 = 1 << 22;
/// Counts cycles with fewer events than the counter mask, instead of cycles with at least as many.
pub const INVERT: u64 = 1 << 23;
/// Counts cycles with at least this number of events, instead of events.
pub const COUNTER_MASK: u64 = 0xff << 24;

/// Returns what a select register counts. `code` is the register's bits that select the event.
pub fn selection(select: u64, code: u64, mapper: &EventMapper) -> Option<Selection> {
    let filter = Filter::of(select & USER != 0, select & OS != 0)?;
    Some(mapper.selection(code, filter))
}

/// Returns the configuration of the counter of a select register that counts `selection`.
pub fn config(select: u64, selection: Option<Selection>) -> CounterConfig {
    CounterConfig { selection, enabled: select & ENABLE != 0, interrupts: select & INTERRUPT != 0 }
}
