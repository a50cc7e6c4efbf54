//! Minimum distance between a guest's overflows during a flood, so that a hostile guest cannot keep the host busy
//! delivering them.

use std::time::Duration;

/// Alarms closer than this are short. Periods from here on are never touched.
pub const PERIOD: u64 = 10_000;

/// So many short alarms in one window are a flood. A guest that looks for the period of a rate (`perf record -F`)
/// begins with tiny ones, and takes a few dozen for each counter.
const BUDGET: u32 = 1000;
const WINDOW: Duration = Duration::from_millis(100);

/// The state of one vCPU's floor.
#[derive(Debug, Default)]
pub struct Floor {
    window: Duration,
    alarms: u32,
    raised: bool,
    times: u64,
    /// Time at which the operator was last notified.
    notified: Option<Duration>,
}

impl Floor {
    /// Records an alarm whose distance was short. Returns how often the floor has been raised if the operator is to be
    /// notified of that now.
    pub fn short_alarm(&mut self, now: Duration) -> Option<u64> {
        if now.saturating_sub(self.window) >= WINDOW {
            (self.window, self.alarms) = (now, 0);
        }
        self.alarms = self.alarms.saturating_add(1);
        if self.alarms != BUDGET {
            return None;
        }
        self.raised = true;
        self.times += 1;
        // A guest that floods for hours is worth a line a minute, not a hundred a second.
        if self.notified.is_some_and(|notified| now.saturating_sub(notified) < Duration::from_mins(1)) {
            return None;
        }
        self.notified = Some(now);
        Some(self.times)
    }

    /// The least distance between two alarms of a counter at this time.
    pub fn distance(&mut self, now: impl FnOnce() -> Duration) -> u64 {
        if self.raised {
            self.raised = now().saturating_sub(self.window) < WINDOW;
        }
        if self.raised { PERIOD } else { 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_raises_the_floor_until_its_window_ends() {
        let mut floor = Floor::default();
        let at = Duration::from_micros;
        for alarm in 1..u64::from(BUDGET) {
            assert_eq!(floor.short_alarm(at(alarm)), None);
            assert_eq!(floor.distance(|| at(alarm)), 1);
        }
        assert_eq!(floor.short_alarm(at(3000)), Some(1));
        assert_eq!(floor.distance(|| at(3001)), PERIOD);
        assert_eq!(floor.distance(|| at(100_300)), 1);
    }

    #[test]
    fn many_alarms_in_a_long_time_are_no_flood() {
        let mut floor = Floor::default();
        for alarm in 0..100_000 {
            let now = Duration::from_micros(alarm * 200);
            assert_eq!(floor.short_alarm(now), None);
            assert_eq!(floor.distance(|| now), 1);
        }
    }

    #[test]
    fn a_flood_that_goes_on_is_reported_once_a_minute() {
        let mut floor = Floor::default();
        let reports = (0..3_600_000)
            .filter(|alarm| floor.short_alarm(Duration::from_micros(*alarm * 50)).is_some())
            .count();
        assert_eq!(reports, 3);
    }
}
