//! What the event selects of both vendors have alike: they go back to one processor, the Pentium Pro.

use crate::event::{Filter, Selection};
use crate::event_mapper::EventMapper;
use crate::unit::CounterConfig;

/// The unit mask.
pub const UNIT_MASK: u64 = 0xff << 8;
/// Counts in user mode.
pub const USER: u64 = 1 << 16;
/// Counts in the kernel.
pub const OS: u64 = 1 << 17;
/// Counts how often the event begins.
pub const EDGE: u64 = 1 << 18;
/// An overflow interrupts.
pub const INTERRUPT: u64 = 1 << 20;
/// The counter counts.
pub const ENABLE: u64 = 1 << 22;
/// Counts the cycles below the counter mask, and not those from it on.
pub const INVERT: u64 = 1 << 23;
/// Counts cycles with at least so many events.
pub const COUNTER_MASK: u64 = 0xff << 24;

/// What is counted by a select, of which these bits encode the event.
pub fn selection(select: u64, code: u64, mapper: &EventMapper) -> Option<Selection> {
    let filter = Filter::of(select & USER != 0, select & OS != 0)?;
    Some(mapper.selection(code, filter))
}

/// What a counter is told by a select that selects this.
pub fn config(select: u64, selection: Option<Selection>) -> CounterConfig {
    CounterConfig { selection, enabled: select & ENABLE != 0, interrupts: select & INTERRUPT != 0 }
}
