//! The host's perf events, each of which counts this vCPU's thread while it is in the guest.
//!
//! Everything here belongs to the vCPU's own thread: its events count that thread, signal that thread, and can be read
//! without a system call by that thread only.

mod attribution;
mod estimate;
mod event;
mod host;
mod obstacle;
mod page;
mod probe;

use std::collections::HashMap;
use std::fs;
use std::io;
use std::time::{Duration, Instant};

use self::event::{Calls, PerfEvent};
use vpmu::event::{Event, Selection};
use vpmu::policy::{OnStarvation, Policy};
use vpmu::report::BackingReport;
use vpmu::source::{Backing, Count, FAR, PolicyEffect, Refusal, Source};

pub use self::attribution::{Attributed, Attribution, Reading, Work};
pub use self::host::{HostPmu, WATCHDOG};
pub use self::obstacle::Obstacle;
pub use self::probe::{Free, exists, free_counters, generic_events};

/// Makes perf events for the thread that it lives on.
pub struct PerfEvents {
    pmu: HostPmu,
    epoch: Instant,
    /// How far apart an event's overflows have to be, as of then.
    pace: Duration,
    pace_read: Duration,
    calls: Calls,
    /// Whether what events miss is estimated.
    estimates: bool,
    /// What was found out of events: whether the host has them.
    known: HashMap<Event, bool>,
}

/// A guest can ask for any number of events; so many are known at a time.
const MOST_KNOWN: usize = 1024;

/// Twice the least time that the host allows between an event's overflows, on average; it stops those that are faster, until
/// its next tick. It lowers the rate by itself when its own handler takes long.
fn pace() -> Duration {
    const BY_DEFAULT: u32 = 100_000;
    let rate = fs::read_to_string("/proc/sys/kernel/perf_event_max_sample_rate");
    let rate = rate.ok().and_then(|rate| rate.trim().parse().ok()).unwrap_or(BY_DEFAULT);
    Duration::from_secs(2) / rate.max(1)
}

impl PerfEvents {
    /// Events of this PMU, whose alarms send `SIGIO`.
    pub fn new(pmu: HostPmu) -> Self {
        Self {
            pmu,
            epoch: Instant::now(),
            pace: pace(),
            pace_read: Duration::ZERO,
            calls: Calls::default(),
            estimates: false,
            known: HashMap::new(),
        }
    }
}

impl Source for PerfEvents {
    type Backing = PerfEvent;

    fn start(&mut self, selection: Selection, distance: u64) -> Result<PerfEvent, Refusal> {
        let mut event =
            with_period(distance, |period| PerfEvent::open(self.pmu, selection, period, self.calls.clone()))
                .and_then(|event| event.signal_this_thread().map(|()| event))
                .map_err(|error| Refusal(error.to_string()))?;
        if self.estimates {
            event.estimate();
        }
        Ok(event)
    }

    /// A kernel that does not ask its PMU before somebody is to be counted takes every encoding.
    fn can_count(&mut self, event: Event) -> bool {
        if let Some(known) = self.known.get(&event) {
            return *known;
        }
        let Some(can) = verdict(PerfEvent::trial(self.pmu, event, self.calls.clone())) else { return true };
        if self.known.len() >= MOST_KNOWN {
            self.known.clear();
        }
        self.known.insert(event, can);
        can
    }

    fn now(&self) -> Duration {
        self.epoch.elapsed()
    }

    fn may_repeat(&mut self, now: Duration, interval: Duration) -> bool {
        if now.saturating_sub(self.pace_read) >= Duration::from_secs(1) {
            (self.pace, self.pace_read) = (pace(), now);
        }
        interval >= self.pace
    }

    fn set_policy(&mut self, policy: &Policy) -> PolicyEffect {
        let estimates = policy.on_starvation == OnStarvation::Scale;
        let before = std::mem::replace(&mut self.estimates, estimates);
        if before == estimates { PolicyEffect::Immediate } else { PolicyEffect::OnNewBackings }
    }

    fn requests(&self) -> u64 {
        self.calls.number()
    }
}

impl Backing for PerfEvent {
    fn count(&mut self) -> Count {
        self.read()
    }

    fn arm(&mut self, distance: u64) -> Result<(), Refusal> {
        with_period(distance, |period| self.set_period(period)).map_err(|error| Refusal(error.to_string()))
    }

    fn estimated(&self) -> u64 {
        self.estimated()
    }

    fn report(&mut self) -> BackingReport {
        PerfEvent::report(self)
    }
}

/// Whether the host has an event, by what it says to one; nothing if that may change.
fn verdict<T>(answer: io::Result<T>) -> Option<bool> {
    match answer {
        Ok(_) => Some(true),
        Err(error) => match error.raw_os_error() {
            // The last is also what a PMU says that cannot tell guests from the host.
            None | Some(libc::ENOENT | libc::ENODEV | libc::EOPNOTSUPP | libc::EINVAL) => Some(false),
            Some(_) => None,
        },
    }
}

/// Asks for an alarm in so many counts, or as few as the host takes: what has overflowed is computed, so a late alarm is late
/// and no more.
fn with_period<T>(distance: u64, mut ask: impl FnMut(u64) -> io::Result<T>) -> io::Result<T> {
    /// Linux makes 2 of 1; but 1 on Intel's branch event is another request altogether, that for a trace of branches.
    const LEAST: u64 = 2;
    /// Several processors of Intel's are wrong with shorter ones, and Linux refuses these (`limit_period`).
    const LEAST_EVERYWHERE: u64 = 128;
    match ask(distance.clamp(LEAST, FAR)) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) && distance < LEAST_EVERYWHERE => {
            ask(LEAST_EVERYWHERE)
        }
        answer => answer,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a host that takes periods from `least` on was asked for, and said in the end.
    fn asked(distance: u64, least: u64) -> (Vec<u64>, bool) {
        let mut asked = Vec::new();
        let answer = with_period(distance, |period| {
            asked.push(period);
            if period < least { Err(io::Error::from_raw_os_error(libc::EINVAL)) } else { Ok(()) }
        });
        (asked, answer.is_ok())
    }

    #[test]
    fn an_event_is_missing_if_the_host_says_so_and_not_if_there_is_no_room() {
        let said = |errno| verdict::<()>(Err(io::Error::from_raw_os_error(errno)));
        assert_eq!(verdict(Ok(())), Some(true));
        assert_eq!([said(libc::ENOENT), said(libc::EINVAL)], [Some(false); 2]);
        assert_eq!([said(libc::EBUSY), said(libc::EMFILE), said(libc::EACCES)], [None; 3]);
        assert_eq!(verdict::<()>(Err(io::Error::other("the policy denies it"))), Some(false));
    }

    #[test]
    fn no_host_is_asked_for_a_trace_of_branches() {
        assert_eq!(asked(1, 0), (vec![2], true));
        assert_eq!(asked(u64::MAX, 0), (vec![FAR], true));
    }

    #[test]
    fn a_host_that_refuses_short_periods_is_asked_for_a_longer_one() {
        assert_eq!(asked(5, 32), (vec![5, 128], true));
        assert_eq!(asked(500, 32), (vec![500], true));
        assert_eq!(asked(5, 1000), (vec![5, 128], false));
        assert_eq!(asked(500, 1000), (vec![500], false), "that is not why it refuses");
    }
}
