//! A floor under the distance between a guest's overflows, so that a hostile guest cannot have the host do nothing but
//! deliver them. It is not there until a guest floods.

use std::time::Duration;

/// Alarms closer than this are short. Periods from here on are never touched.
pub const PERIOD: u64 = 10_000;

/// So many short alarms in one window are a flood. A guest that looks for the period of a rate (`perf record -F`) begins with
/// tiny ones, and takes a few dozen for each counter.
const BUDGET: u32 = 1000;
const WINDOW: Duration = Duration::from_millis(100);

/// The state of one vCPU's floor.
#[derive(Debug, Default)]
pub struct Floor {
    window: Duration,
    alarms: u32,
    raised: bool,
    times: u64,
    told: Option<Duration>,
}

/// Whether the operator is to hear of it.
#[derive(Debug, PartialEq, Eq)]
pub enum Tell {
    /// Nothing new.
    Nothing,
    /// The floor was raised, so many times by now.
    Raised(u64),
}

impl Floor {
    /// Takes note of an alarm whose distance was short.
    pub fn short_alarm(&mut self, now: Duration) -> Tell {
        if now.saturating_sub(self.window) >= WINDOW {
            (self.window, self.alarms) = (now, 0);
        }
        self.alarms = self.alarms.saturating_add(1);
        if self.alarms != BUDGET {
            return Tell::Nothing;
        }
        self.raised = true;
        self.times += 1;
        // A guest that floods for hours is worth a line a minute, not a hundred a second.
        if self.told.is_some_and(|told| now.saturating_sub(told) < Duration::from_mins(1)) {
            return Tell::Nothing;
        }
        self.told = Some(now);
        Tell::Raised(self.times)
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
            assert_eq!(floor.short_alarm(at(alarm)), Tell::Nothing);
            assert_eq!(floor.distance(|| at(alarm)), 1);
        }
        assert_eq!(floor.short_alarm(at(3000)), Tell::Raised(1));
        assert_eq!(floor.distance(|| at(3001)), PERIOD);
        assert_eq!(floor.distance(|| at(100_300)), 1);
    }

    #[test]
    fn many_alarms_in_a_long_time_are_no_flood() {
        let mut floor = Floor::default();
        for alarm in 0..100_000 {
            let now = Duration::from_micros(alarm * 200);
            assert_eq!(floor.short_alarm(now), Tell::Nothing);
            assert_eq!(floor.distance(|| now), 1);
        }
    }

    #[test]
    fn a_flood_that_goes_on_is_told_once_a_minute() {
        let mut floor = Floor::default();
        let told = (0..3_600_000)
            .filter(|alarm| floor.short_alarm(Duration::from_micros(*alarm * 50)) != Tell::Nothing)
            .count();
        assert_eq!(told, 3);
    }
}
