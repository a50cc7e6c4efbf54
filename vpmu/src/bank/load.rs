//! How near an event of the host is to being throttled. Linux counts an event's overflows from one tick to the next,
//! and stops the event until the next tick when they are as many as its limit permits in a tick. To set an alarm starts
//! the event again. To let an alarm repeat does not, and the event would stand still without anybody knowing.

use std::time::Duration;

/// The shortest tick that Linux has.
const TICK: Duration = Duration::from_millis(1);
/// Twice the longest one: what was longer ago is in no tick of now.
const REMEMBERED: Duration = Duration::from_millis(20);

/// How often an event's alarms have expired of late: a bucket of time that drains as time passes, and to which each
/// alarm adds the source's least interval.
#[derive(Debug, Clone, Copy, Default)]
pub struct Load {
    level: Duration,
    /// Time of the last alarm.
    at: Duration,
}

impl Load {
    /// Records that an alarm expires. Alarms may have `least_interval` between them on average, which is twice what the
    /// host permits. Returns whether the event counts on if this alarm is left to repeat.
    ///
    /// In a tick, there are at most as many alarms as are in the bucket and as it was emptied of meanwhile. If these
    /// are less than a tick each, they are fewer than the host permits.
    pub fn adds_alarm(&mut self, now: Duration, least_interval: Duration) -> bool {
        let since = now.saturating_sub(std::mem::replace(&mut self.at, now));
        self.level = self.level.saturating_sub(since).saturating_add(least_interval).min(REMEMBERED);
        self.level.saturating_add(least_interval) <= TICK
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn where_the_host_permits_few_overflows_in_a_tick_no_alarm_repeats() {
        let now = 1000 * SECOND;
        assert!(Load::default().adds_alarm(now, 2 * SECOND / 100_000), "Linux' limit by default");
        assert!(Load::default().adds_alarm(now, 2 * SECOND / 4000));
        assert!(!Load::default().adds_alarm(now, 2 * SECOND / 1000));
    }

    proptest! {
        #[test]
        fn an_event_whose_alarm_repeats_is_never_throttled(
            rate in 1_u32..100_000,
            ticks_per_second in prop_oneof![Just(100_u32), Just(250), Just(300), Just(1000)],
            // Nanoseconds between two alarms.
            intervals in proptest::collection::vec(prop_oneof![0_u64..5_000, 0_u64..100_000, 0_u64..20_000_000], 1..300),
        ) {
            let (permitted, tick) = (rate.div_ceil(ticks_per_second), SECOND / ticks_per_second);
            let (mut load, mut now, mut overflows, mut ticks) = (Load::default(), SECOND, 0, 0);
            for interval in intervals {
                now += Duration::from_nanos(interval);
                let ticks_now = now.as_nanos() / tick.as_nanos();
                overflows = if std::mem::replace(&mut ticks, ticks_now) == ticks_now { overflows + 1 } else { 1 };
                if load.adds_alarm(now, 2 * SECOND / rate) {
                    prop_assert!(overflows < permitted, "{overflows} of {permitted}");
                }
            }
        }
    }
}
