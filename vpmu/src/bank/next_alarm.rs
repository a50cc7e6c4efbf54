//! Decides which alarm to set next. `arming.rs` sets it. A host event has one alarm, for the nearest overflow of its
//! counters that interrupts. Setting it is a request to the host, so an alarm that will expire early is kept: whether a
//! counter has overflowed is computed from its value.
//!
//! The host repeats an alarm with the same distance, however short that was. In a guest that has stopped its counters
//! to handle the overflow, a short one could expire over and over, and the guest would make no progress. So an alarm is
//! set for one expiry, unless one repetition is harmless: the guest's next overflow is often at the same distance, and
//! then needs no request at all.

use crate::source::FAR;

/// Minimum distance of an alarm that may repeat: the guest's handler is done before it expires again.
pub const MIN_REPEAT_DISTANCE: u64 = 8192;

/// Minimum distance of an alarm while the kernel is predicted to stop its counters first: enough for the kernel to set
/// them anew. If it does not stop them, one overflow is reported that much too late.
const STOP_GRACE: u64 = 65_536;

/// The alarm that is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Armed {
    /// Count at which it expires.
    pub at: u64,
    /// Number of counts from its setting to its expiry; the host repeats it with this distance.
    pub distance: u64,
    /// Mask of the counter for whose overflow it was set, if it was set for one.
    pub counter_mask: u64,
    pub kind: AlarmKind,
    /// By how much it may be early and its overflow count as one that has happened.
    pub early: u64,
}

/// Whether an alarm is kept that would expire early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AlarmKind {
    /// It is kept.
    Kept,
    /// It is not kept: it was set while the guest had an overflow to handle, and would always expire early by what is
    /// counted in the handler.
    OneShot,
    /// It is not kept: it has expired and was left to repeat.
    Repeating,
}

/// An overflow to come that needs an alarm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NextOverflow {
    /// Count of the host event at which the alarm has to expire.
    pub at: u64,
    /// The counter that overflows.
    pub counter: usize,
}

/// An alarm that has expired, after its counters were updated.
#[derive(Debug, Clone, Copy)]
pub struct Expired {
    pub alarm: Armed,
    /// Count of the host event now.
    pub count: u64,
    /// The nearest overflow to come.
    pub next: Option<NextOverflow>,
    /// The host event counts user mode only, so it stands still in the guest's handler.
    pub user_only: bool,
    /// Set if one of its counters interrupts the guest now.
    pub interrupt: Option<Interrupting>,
}

/// What is known of an interrupt that is about to be injected.
#[derive(Debug, Clone, Copy)]
pub struct Interrupting {
    /// The kernel is predicted to stop its counters first.
    pub stops_first: bool,
    /// The host has not stopped the event at this alarm, so the event counts on if the alarm is left to repeat.
    pub may_repeat: bool,
}

/// What to do about the alarm of a host event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NextAlarm {
    /// The host repeats it.
    Repeat(Armed),
    /// It is set for this overflow.
    Set(NextOverflow, AlarmKind),
    /// It is set as far away as possible: no counter needs one.
    Off,
}

impl Expired {
    /// Returns whether the next alarm waits until the kernel stops its counters.
    pub fn waits(&self) -> bool {
        !self.user_only && self.interrupt.is_some_and(|interrupt| interrupt.stops_first)
    }

    /// Decides about the next alarm.
    pub fn next_alarm(&self) -> NextAlarm {
        let Self { alarm, count, .. } = *self;
        let again = alarm.at.saturating_add(alarm.distance);
        let near = self.next.filter(|next| next.at < count.saturating_add(FAR));
        // The counter that a repetition would be for, if one is early enough.
        let counter_mask = match self.next {
            Some(next) if again == next.at => Some(1 << next.counter),
            // The alarm of another counter, which the handler does not postpone, is set now: the handler then needs no
            // exit.
            Some(_) if near.is_some() && self.user_only => None,
            Some(next) if again < next.at || self.waits() => Some(alarm.counter_mask),
            _ => None,
        };
        if let Some(counter_mask) = counter_mask.filter(|_| self.can_repeat(again)) {
            return NextAlarm::Repeat(Armed { at: again, counter_mask, kind: AlarmKind::Repeating, ..alarm });
        }
        let Some(mut next) = near else { return NextAlarm::Off };
        if self.waits() {
            next.at = next.at.max(count.saturating_add(STOP_GRACE));
        }
        let kind = if self.interrupt.is_some() { AlarmKind::OneShot } else { AlarmKind::Kept };
        NextAlarm::Set(next, kind)
    }

    fn can_repeat(&self, again: u64) -> bool {
        self.interrupt.is_some_and(|interrupt| interrupt.may_repeat)
            && self.alarm.kind != AlarmKind::Repeating
            && self.alarm.distance >= MIN_REPEAT_DISTANCE
            && again > self.count
    }
}

impl Armed {
    /// Returns whether this alarm serves an overflow, so that none has to be set.
    pub fn serves(&self, next: NextOverflow) -> bool {
        let expires_late = next.at < self.at;
        // An alarm a single count too early would leave a distance of 1, which Linux changes to 2.
        let expires_a_count_early = self.at.checked_add(1) == Some(next.at);
        let is_not_kept = next.at > self.at.saturating_add(self.early) && self.kind != AlarmKind::Kept;
        !(expires_late || expires_a_count_early || is_not_kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALARM: Armed =
        Armed { at: 10_000, distance: 10_000, counter_mask: 1, kind: AlarmKind::Kept, early: 0 };

    fn expired(next: Option<u64>, interrupt: Option<Interrupting>) -> Expired {
        let next = next.map(|at| NextOverflow { at, counter: 1 });
        Expired { alarm: ALARM, count: 10_003, next, user_only: false, interrupt }
    }

    const INTERRUPT: Option<Interrupting> = Some(Interrupting { stops_first: false, may_repeat: true });
    const STOPS: Option<Interrupting> = Some(Interrupting { stops_first: true, may_repeat: true });

    fn set(at: u64, kind: AlarmKind) -> NextAlarm {
        NextAlarm::Set(NextOverflow { at, counter: 1 }, kind)
    }

    fn repeat(counter_mask: u64) -> NextAlarm {
        NextAlarm::Repeat(Armed { at: 20_000, counter_mask, kind: AlarmKind::Repeating, ..ALARM })
    }

    #[test]
    fn an_alarm_repeats_if_that_is_early_enough_and_the_guest_is_interrupted() {
        assert_eq!(expired(Some(20_000), INTERRUPT).next_alarm(), repeat(2), "at the very count");
        assert_eq!(expired(Some(30_000), INTERRUPT).next_alarm(), repeat(1), "earlier");
        assert_eq!(expired(Some(19_999), INTERRUPT).next_alarm(), set(19_999, AlarmKind::OneShot), "later");
        assert_eq!(expired(Some(20_000), None).next_alarm(), set(20_000, AlarmKind::Kept));
    }

    #[test]
    fn no_alarm_repeats_that_could_keep_the_guest_from_its_handler() {
        let interrupted = expired(Some(30_000), INTERRUPT);
        for alarm in [
            Armed { at: 8191, distance: 8191, ..ALARM },
            Armed { kind: AlarmKind::Repeating, ..ALARM },
            Armed { at: 1, ..ALARM },
        ] {
            assert_eq!(
                Expired { alarm, ..interrupted }.next_alarm(),
                set(30_000, AlarmKind::OneShot),
                "{alarm:?}"
            );
        }
        let throttled = Some(Interrupting { stops_first: false, may_repeat: false });
        assert_eq!(expired(Some(30_000), throttled).next_alarm(), set(30_000, AlarmKind::OneShot));
    }

    #[test]
    fn a_kernel_that_stops_its_counters_first_gets_time_to_do_so() {
        assert_eq!(expired(Some(10_010), STOPS).next_alarm(), repeat(1));
        let alarm = Armed { kind: AlarmKind::Repeating, ..ALARM };
        let stops = Expired { alarm, ..expired(Some(10_010), STOPS) };
        assert!(stops.waits());
        assert_eq!(stops.next_alarm(), set(10_003 + STOP_GRACE, AlarmKind::OneShot));
        // The handler does not postpone what it does not count.
        let programs = Expired { user_only: true, ..stops };
        assert!(!programs.waits());
        assert_eq!(programs.next_alarm(), set(10_010, AlarmKind::OneShot));
    }

    #[test]
    fn an_overflow_that_is_far_away_or_absent_needs_no_alarm() {
        assert_eq!(expired(None, INTERRUPT).next_alarm(), NextAlarm::Off);
        assert_eq!(expired(Some(10_003 + FAR), None).next_alarm(), NextAlarm::Off);
        assert_eq!(expired(Some(10_002 + FAR), None).next_alarm(), set(10_002 + FAR, AlarmKind::Kept));
    }

    #[test]
    fn an_early_alarm_is_kept_and_a_late_one_is_not() {
        let serves = |kind, at| Armed { kind, ..ALARM }.serves(NextOverflow { at, counter: 0 });
        assert!(serves(AlarmKind::Kept, 10_000) && serves(AlarmKind::Kept, 10_002));
        assert!(!serves(AlarmKind::Kept, 9_999) && !serves(AlarmKind::Kept, 10_001));
        let early = Armed { kind: AlarmKind::OneShot, early: 100, ..ALARM };
        assert!([10_000, 10_100].iter().all(|at| early.serves(NextOverflow { at: *at, counter: 0 })));
        assert!(!early.serves(NextOverflow { at: 10_101, counter: 0 }));
        for kind in [AlarmKind::OneShot, AlarmKind::Repeating] {
            assert!(serves(kind, 10_000) && !serves(kind, 10_002));
        }
    }
}
