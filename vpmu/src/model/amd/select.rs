//! The `PERF_CTL` registers (APM volume 2, 13.2.1).
//!
//! A write never faults: processors of every generation drop the reserved bits. Zen 3 keeps two of them, 19 and 42,
//! without a meaning.

use crate::event::Selection;
use crate::event_mapper::EventMapper;
use crate::model::select::{self, COUNTER_MASK, EDGE, ENABLE, INTERRUPT, INVERT, OS, UNIT_MASK, USER};
use crate::unit::CounterConfig;

/// The event: bits 7..0 and 35..32.
const EVENT: u64 = 0xf_0000_00ff;
/// `GuestOnly`. Here "guest" would be a nested guest. There is none, and `EFER.SVME` is clear: as on a processor on
/// which it is clear, a counter with exactly one of `GuestOnly` and `HostOnly` does not count, and a counter with both
/// does.
const GUEST_ONLY: u64 = 1 << 40;
/// `HostOnly`, see [`GUEST_ONLY`].
const HOST_ONLY: u64 = 1 << 41;

/// The bits that select the event. The other bits say when it is counted.
const SELECTS: u64 = EVENT | UNIT_MASK | EDGE | INVERT | COUNTER_MASK;
/// The Merge event (PPR, "Large Increment per Cycle Events"): the counter holds the upper bits of the counter below,
/// whose event can count more than 15 in a cycle. The host's kernel pairs counters for such an event by itself.
const MERGE: u64 = 0xf_0000_00ff;

/// The register's value, without the reserved bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Select(u64);

impl From<u64> for Select {
    fn from(value: u64) -> Self {
        Self(value & Self::DEFINED)
    }
}

impl Select {
    /// The bits that are not reserved.
    pub const DEFINED: u64 = SELECTS | USER | OS | INTERRUPT | ENABLE | GUEST_ONLY | HOST_ONLY;

    /// Returns the value that a read returns.
    pub fn value(self) -> u64 {
        self.0
    }

    /// Returns the configuration of the register's counter.
    pub fn config(self, mapper: &EventMapper) -> CounterConfig {
        select::config(self.0, self.0 & SELECTS, self.selection(mapper))
    }

    fn selection(self, mapper: &EventMapper) -> Option<Selection> {
        let is_restricted = (self.0 & GUEST_ONLY != 0) != (self.0 & HOST_ONLY != 0);
        if self.0 & EVENT == MERGE || is_restricted {
            return None;
        }
        select::selection(self.0, self.0 & SELECTS, mapper)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Event, Filter, Scope};
    use crate::policy::Policy;
    use crate::x86::Vendor;

    fn selection(value: u64) -> Option<Selection> {
        Select::from(value).selection(&EventMapper::new(Vendor::Amd, Vendor::Amd, Policy::default()))
    }

    #[test]
    fn reserved_bits_are_dropped() {
        assert_eq!(Select::from(u64::MAX).value(), 0x0000_030f_ffd7_ffff);
    }

    #[test]
    fn the_hosts_event_has_only_the_bits_that_select_the_event() {
        let expected =
            Selection { event: Event::Raw(0x1_0584_31c0), filter: Filter::All, scope: Scope::Guest };
        assert_eq!(selection(0x0000_0001_05d7_31c0), Some(expected));
    }

    #[test]
    fn without_a_privilege_level_nothing_is_counted() {
        assert_eq!(selection(0x53_00c0 & !(USER | OS)), None);
        assert_eq!(selection(0x51_00c0).map(|s| s.filter), Some(Filter::User));
        assert_eq!(selection(0x52_00c0).map(|s| s.filter), Some(Filter::Kernel));
    }

    #[test]
    fn a_counter_with_one_of_guest_only_and_host_only_counts_nothing() {
        for (bits, counts) in [(0, true), (1, false), (2, false), (3, true)] {
            assert_eq!(selection(bits << 40 | 0x53_00c0).is_some(), counts, "{bits}");
        }
    }

    #[test]
    fn the_merge_event_counts_nothing_by_itself() {
        assert_eq!(selection(0xf_0053_00ff), None);
    }
}
