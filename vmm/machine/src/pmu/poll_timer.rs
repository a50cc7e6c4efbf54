//! A timer that calls the vCPU's thread out of the guest at intervals, while that thread holds counters of the host. Counters that
//! have lost their hardware are found soon, and hardware that no counter uses is released after a while.

use std::io;
use std::time::{Duration, Instant};

use super::timer::{Rings, Timer};

/// Short enough for an operator to hear of a lost counter within a tenth of a second.
const USUAL: Duration = Duration::from_millis(50);
/// While a counter is without hardware, which is to have it as soon as others give it back.
const SHORT: Duration = Duration::from_millis(10);
/// A counter keeps unused hardware for at least this long.
const IDLE: Duration = Duration::from_secs(1);

/// The poll timer of a thread.
pub struct PollTimer {
    timer: Timer,
    rhythm: Rhythm,
    /// When it last expired.
    last: Instant,
    /// When unused hardware was last released.
    idle: Instant,
}

/// How often the timer expires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rhythm {
    /// Never.
    Off,
    /// At the usual interval: there are counters to poll.
    Usual,
    /// At a short interval: a counter has no hardware.
    Short,
}

impl Rhythm {
    fn interval(self) -> Option<Duration> {
        match self {
            Self::Off => None,
            Self::Usual => Some(USUAL),
            Self::Short => Some(SHORT),
        }
    }
}

/// What to do when the timer has expired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// Look whether counters have their hardware.
    Look,
    /// Look, and release what is not used.
    GiveBack,
}

impl PollTimer {
    /// Creates a timer for this thread, switched off, that sends this signal.
    pub fn new(signal: libc::c_int) -> io::Result<Self> {
        let now = Instant::now();
        Ok(Self { timer: Timer::new(signal)?, rhythm: Rhythm::Off, last: now, idle: now })
    }

    /// Sets the interval.
    pub fn set(&mut self, rhythm: Rhythm) {
        if rhythm == self.rhythm {
            return;
        }
        let now = Instant::now();
        if self.rhythm == Rhythm::Off {
            self.idle = now;
        }
        (self.rhythm, self.last) = (rhythm, now);
        self.timer.set(rhythm.interval().map_or(Rings::Never, Rings::Every));
    }

    /// Returns what to do after a signal, if the timer has expired.
    pub fn take(&mut self) -> Option<Due> {
        let interval = self.rhythm.interval()?;
        let now = Instant::now();
        if !is_due(&mut self.last, interval, now) {
            return None;
        }
        Some(if is_due(&mut self.idle, IDLE, now) { Due::GiveBack } else { Due::Look })
    }
}

/// Returns whether `interval` has passed since `last`, and advances `last` by whole intervals, however late this thread is.
fn is_due(last: &mut Instant, interval: Duration, now: Instant) -> bool {
    let times = now.duration_since(*last).as_nanos() / interval.as_nanos();
    *last += interval * u32::try_from(times).unwrap_or(u32::MAX);
    times > 0
}
