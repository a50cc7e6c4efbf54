//! The bits that the event select registers of AMD and Intel share. Both go back to the Pentium Pro.

use std::num::NonZeroU64;

use crate::ebb;
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

/// Returns what a select register counts. `code` is the register's bits that select the event. With the flag of
/// event-based branches, which no host's PMU sees, that is counted in user mode only.
pub fn selection(select: u64, code: u64, mapper: &EventMapper) -> Option<Selection> {
    let (user, os, is_flagged) = (select & USER != 0, select & OS != 0, is_flagged(code));
    let (code, os) = if is_flagged { (code & !ebb::FLAG, false) } else { (code, os) };
    let selection = mapper.selection(code, Filter::of(user, os)?);
    Some(if is_flagged { mapper.flagged(code, selection) } else { selection })
}

/// Returns the configuration of the counter of a select register that counts `selection`. `code` is the register's bits
/// that select the event.
pub fn config(select: u64, code: u64, selection: Option<Selection>) -> CounterConfig {
    let branches = NonZeroU64::new(code).filter(|_| is_flagged(code));
    CounterConfig { selection, enabled: select & ENABLE != 0, interrupts: select & INTERRUPT != 0, branches }
}

fn is_flagged(code: u64) -> bool {
    code & (ebb::FLAG | INVERT) == ebb::FLAG
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flag_of_event_based_branches_is_an_edge_with_the_greatest_counter_mask() {
        assert_eq!(ebb::FLAG, COUNTER_MASK | EDGE);
        assert!(is_flagged(ebb::FLAG | 0xc0) && !is_flagged(ebb::FLAG | INVERT) && !is_flagged(EDGE));
    }
}
