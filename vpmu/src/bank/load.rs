//! How near an event of the host is to being throttled. Linux counts an event's overflows from one tick to the next,
//! and stops the event until the next tick when they are as many as its limit permits in a tick. To set an alarm starts
//! the event again. To let an alarm repeat does not, and the event would stand still without anybody knowing.

use std::time::Duration;

/// The shortest tick that Linux has, in nanoseconds.
const TICK: u64 = 1_000_000;
/// Twice the longest one: what was longer ago is in no tick of now.
const REMEMBERED: u64 = 20 * TICK;

/// How often an event's alarms have expired of late: a bucket of time that drains as time passes, and to which each
/// alarm adds the source's least interval.
#[derive(Debug, Clone, Copy, Default)]
pub struct Load {
    /// In nanoseconds, which are cheaper than seconds and nanoseconds.
    level: u64,
    /// Time of the last alarm.
    last_alarm: Duration,
    /// The event counts on if its last alarm is left to repeat.
    may_repeat: bool,
}

impl Load {
    /// Records that an alarm expires. Alarms may have `least_interval` between them on average, which is twice what the
    /// host permits.
    ///
    /// In a tick, there are at most as many alarms as are in the bucket and as it was emptied of meanwhile. If these
    /// are less than a tick each, they are fewer than the host permits, and the alarm may be left to repeat.
    pub fn add_alarm(&mut self, now: Duration, least_interval: Duration) {
        let since = nanoseconds(now).saturating_sub(nanoseconds(self.last_alarm));
        self.last_alarm = now;
        let least_interval = nanoseconds(least_interval);
        self.level = self.level.saturating_sub(since).saturating_add(least_interval).min(REMEMBERED);
        self.may_repeat = self.level.saturating_add(least_interval) <= TICK;
    }

    /// Returns the time at which the last alarm expired.
    pub fn last_alarm(&self) -> Duration {
        self.last_alarm
    }

    /// Returns true if the host has not stopped the event at its last alarm: it counts on if that is left to repeat.
    pub fn may_repeat(&self) -> bool {
        self.may_repeat
    }
}

/// Returns a time in nanoseconds: there are enough for 584 years.
fn nanoseconds(time: Duration) -> u64 {
    time.as_secs().saturating_mul(1_000_000_000).saturating_add(time.subsec_nanos().into())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn where_the_host_permits_few_overflows_in_a_tick_no_alarm_repeats() {
        let may_repeat = |rate| {
            let mut load = Load::default();
            load.add_alarm(1000 * SECOND, 2 * SECOND / rate);
            load.may_repeat()
        };
        assert!(may_repeat(100_000), "Linux' limit by default");
        assert!(may_repeat(4000) && !may_repeat(1000));
    }

    proptest! {
        #[test]
        fn an_event_whose_alarm_repeats_is_never_throttled(
            rate in (0..18_u32).prop_map(|power| 1_u32 << power),
            ticks_per_second in prop_oneof![Just(100_u32), Just(250), Just(300), Just(1000)],
            // Nanoseconds between two alarms: all of a run are of one range, so that there are long dense runs.
            intervals in (8..26_u32).prop_flat_map(|power| proptest::collection::vec(0..1_u64 << power, 1..1000)),
        ) {
            let (permitted, tick) = (rate.div_ceil(ticks_per_second), SECOND / ticks_per_second);
            let (mut load, mut now, mut overflows, mut ticks) = (Load::default(), SECOND, 0, 0);
            for interval in intervals {
                now += Duration::from_nanos(interval);
                let ticks_now = now.as_nanos() / tick.as_nanos();
                overflows = if std::mem::replace(&mut ticks, ticks_now) == ticks_now { overflows + 1 } else { 1 };
                load.add_alarm(now, 2 * SECOND / rate);
                if load.may_repeat() {
                    prop_assert!(overflows < permitted, "{overflows} of {permitted}");
                }
            }
        }
    }
}
