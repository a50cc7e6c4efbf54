//! What has to be done once in a while, though the guest gives no occasion for it: counters that have lost their hardware are
//! found out soon, and hardware that no counter uses is given back some time later. A timer calls the
//! vCPU's own thread out of the guest, but only while that holds counters of the host.

use std::io;
use std::time::{Duration, Instant};

use super::timer::{Rings, Timer};

/// Short enough for an operator to hear of a lost counter within a tenth of a second.
const USUAL: Duration = Duration::from_millis(50);
/// While a counter is without hardware, which is to have it as soon as others give it back.
const SHORT: Duration = Duration::from_millis(10);
/// For at least so long a counter is left what it does not use.
const IDLE: Duration = Duration::from_secs(1);

/// A thread's pulse.
pub struct Pulse {
    timer: Timer,
    rhythm: Rhythm,
    /// When it was due last.
    beat: Instant,
    /// When the last beat was at which something was given back.
    idle: Instant,
}

/// How often it beats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rhythm {
    /// Not at all.
    Rests,
    /// Now and then: there are counters to be looked at.
    Beats,
    /// Often: one is without hardware.
    Races,
}

impl Rhythm {
    fn interval(self) -> Option<Duration> {
        match self {
            Self::Rests => None,
            Self::Beats => Some(USUAL),
            Self::Races => Some(SHORT),
        }
    }
}

/// What a beat is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// To look whether counters have their hardware.
    Look,
    /// That, and to give back what is not used.
    GiveBack,
}

impl Pulse {
    /// A pulse of this thread, at rest, whose beats are this signal.
    pub fn new(signal: libc::c_int) -> io::Result<Self> {
        let now = Instant::now();
        Ok(Self { timer: Timer::new(signal)?, rhythm: Rhythm::Rests, beat: now, idle: now })
    }

    /// Has it beat like this.
    pub fn set(&mut self, rhythm: Rhythm) {
        if rhythm == self.rhythm {
            return;
        }
        let now = Instant::now();
        if self.rhythm == Rhythm::Rests {
            self.idle = now;
        }
        (self.rhythm, self.beat) = (rhythm, now);
        self.timer.set(rhythm.interval().map_or(Rings::Never, Rings::Every));
    }

    /// After a signal: what is due, if it was a beat.
    pub fn take(&mut self) -> Option<Due> {
        let interval = self.rhythm.interval()?;
        let now = Instant::now();
        if !is_due(&mut self.beat, interval, now) {
            return None;
        }
        Some(if is_due(&mut self.idle, IDLE, now) { Due::GiveBack } else { Due::Look })
    }
}

/// Whether so much time has passed since the last time, which is now then, but in step with a timer, however late this thread is.
fn is_due(last: &mut Instant, interval: Duration, now: Instant) -> bool {
    let times = now.duration_since(*last).as_nanos() / interval.as_nanos();
    *last += interval * u32::try_from(times).unwrap_or(u32::MAX);
    times > 0
}
