//! When the vCPU has to leave the guest although neither the guest nor an alarm makes it: counters that have lost their
//! hardware are found by polling, hardware that no counter uses is released after a while, and an interrupt that the
//! rate limiter throttles is injected as soon as the limit permits.

use std::time::Duration;

use crate::source::Source;
use crate::unit::Unit;

/// Interval of the poll. Short enough for an operator to hear of a lost counter within a tenth of a second.
const POLL: Duration = Duration::from_millis(50);
/// Interval while a counter is starved, so that it soon uses hardware that others give back.
const POLL_STARVED: Duration = Duration::from_millis(10);
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
        if poll.release_at > now {
            return Due::Poll;
        }
        poll.release_at = next(poll.release_at, IDLE, now);
        Due::PollAndRelease
    }

    /// Plans the next poll as the counters need it. Returns how to set the timer.
    pub fn plan<S: Source>(&mut self, unit: &Unit<S>) -> Wake {
        let interval = match (unit.holds_counters(), unit.is_starved()) {
            (false, _) => None,
            (true, false) => Some(POLL),
            (true, true) => Some(POLL_STARVED),
        };
        if self.poll.map(|poll| poll.interval) != interval {
            self.poll = interval.map(|interval| {
                let now = unit.now();
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
        Wake::After(at.saturating_sub(unit.now()))
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
