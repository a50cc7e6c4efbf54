//! When the vCPU has to leave the guest although neither the guest nor an alarm makes it: counters that have lost their
//! hardware are found by polling, hardware that no counter uses is released after a while, and an interrupt that the
//! rate limiter throttles is injected as soon as the limit permits.

use std::time::Duration;

use crate::source::Source;
use crate::unit::Unit;

/// Interval of the poll. Short enough for an operator to hear of a lost counter within a tenth of a second.
const POLL: Duration = Duration::from_millis(50);
/// Intervals while a counter is starved: the first, from which on each is twice as long as the one before, and the
/// longest. So a counter that was refused for a moment misses little more than that, and one that is refused for long
/// costs no more than it must.
const RETRY: (Duration, Duration) = (Duration::from_micros(100), Duration::from_millis(10));
/// Time for which a counter at least keeps hardware that it does not use.
const IDLE: Duration = Duration::from_secs(1);

/// How to set the one timer that kicks the vCPU, with [`super::Cause::Kick`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    /// The timer stays as it is.
    Unchanged,
    /// The timer is switched off.
    Never,
    /// The timer expires once after this time; an earlier setting no longer counts.
    After(Duration),
}

/// What to do when the vCPU was kicked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// The poll is not due.
    Nothing,
    /// Poll for counters that have lost their hardware or got it back.
    Poll,
    /// Poll, and release hardware that no counter uses.
    PollAndRelease,
}

/// The schedule of one vCPU. All times are the source's monotonic time.
#[derive(Debug, Default)]
pub struct Schedule {
    poll: Option<Poll>,
    /// Time at which the VMM's timer expires, as far as is known.
    armed: Option<Duration>,
    retry: Retry,
}

/// The next interval while counters are starved.
#[derive(Debug, Default)]
struct Retry {
    /// The counters that are starved, as far as is known.
    starved: u64,
    interval: Duration,
}

impl Retry {
    /// Returns the interval while these counters are starved, or `None` if none is. The first one comes anew for each
    /// counter.
    fn interval(&mut self, starved: u64) -> Option<Duration> {
        if starved & !std::mem::replace(&mut self.starved, starved) != 0 {
            self.interval = RETRY.0;
        }
        (starved != 0).then_some(self.interval)
    }

    /// Records that it was tried again.
    fn tried(&mut self) {
        self.interval = (2 * self.interval).min(RETRY.1);
    }
}

#[derive(Debug, Clone, Copy)]
struct Poll {
    interval: Duration,
    /// Time of the next poll.
    at: Duration,
    /// Time of the next release.
    release_at: Duration,
}

impl Schedule {
    /// Returns what is due after a kick, and plans its next time.
    pub fn take(&mut self, now: Duration) -> Due {
        if self.armed.is_some_and(|at| at <= now) {
            self.armed = None;
        }
        let Some(poll) = self.poll.as_mut().filter(|poll| poll.at <= now) else { return Due::Nothing };
        poll.at = next(poll.at, poll.interval, now);
        self.retry.tried();
        if poll.release_at > now {
            return Due::Poll;
        }
        poll.release_at = next(poll.release_at, IDLE, now);
        Due::PollAndRelease
    }

    /// Plans the next poll as the counters need it. Returns how to set the timer.
    pub fn plan<S: Source>(&mut self, unit: &Unit<S>) -> Wake {
        let retry = self.retry.interval(unit.bank.starved());
        let interval = unit.bank.is_backed().then(|| retry.unwrap_or(POLL));
        if self.poll.map(|poll| poll.interval) != interval {
            self.poll = interval.map(|interval| {
                let now = unit.bank.now();
                let release_at = self.poll.map_or(now + IDLE, |poll| poll.release_at);
                Poll { interval, at: now + interval, release_at }
            });
        }
        let poll_at = self.poll.map(|poll| poll.at);
        let at = match (poll_at, unit.throttled_until()) {
            (Some(poll), Some(interrupt)) => poll.min(interrupt),
            (poll, interrupt) => match poll.or(interrupt) {
                Some(at) => at,
                None => return self.disarm(),
            },
        };
        // A timer that expires early does no harm.
        if self.armed.is_some_and(|armed| armed <= at) {
            return Wake::Unchanged;
        }
        self.armed = Some(at);
        Wake::After(at.saturating_sub(unit.bank.now()))
    }

    fn disarm(&mut self) -> Wake {
        if self.armed.take().is_some() { Wake::Never } else { Wake::Unchanged }
    }
}

/// Returns the first time after `now` that is a whole number of intervals after `at`, however late this call is.
fn next(at: Duration, interval: Duration, now: Duration) -> Duration {
    let late = now.saturating_sub(at).as_nanos() / interval.as_nanos();
    at + interval * u32::try_from(late).unwrap_or(u32::MAX).saturating_add(1)
}
