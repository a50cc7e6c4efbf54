//! The host's perf events: one for each counter, which counts this vCPU's thread while it is in the guest.
//!
//! Everything here belongs to the vCPU's own thread: its events count that thread, signal that thread, and can be read
//! without a system call by that thread only.

mod event;
mod host;
mod obstacle;
mod page;
mod probe;

use std::fs;
use std::time::{Duration, Instant};

use self::event::PerfEvent;
use super::{Backing, Count, FAR, Refusal, Source};
use crate::event::Selection;

pub use self::host::HostPmu;
pub use self::obstacle::Obstacle;
pub use self::probe::{Free, exists, free_counters};

/// Makes perf events for the thread that it lives on.
pub struct PerfEvents {
    pmu: HostPmu,
    signal: libc::c_int,
    epoch: Instant,
    /// How far apart an event's overflows have to be, as of then.
    pace: Duration,
    pace_read: Instant,
}

/// Twice the least time that the host allows between an event's overflows, on average; it stops those that are faster, until
/// its next tick. It lowers the rate by itself when its own handler takes long.
fn pace() -> Duration {
    const BY_DEFAULT: u32 = 100_000;
    let rate = fs::read_to_string("/proc/sys/kernel/perf_event_max_sample_rate");
    let rate = rate.ok().and_then(|rate| rate.trim().parse().ok()).unwrap_or(BY_DEFAULT);
    Duration::from_secs(2) / rate.max(1)
}

impl PerfEvents {
    /// Events of this PMU, whose alarms send this signal.
    pub fn new(pmu: HostPmu, signal: libc::c_int) -> Self {
        let now = Instant::now();
        Self { pmu, signal, epoch: now, pace: pace(), pace_read: now }
    }
}

impl Source for PerfEvents {
    type Backing = PerfEvent;

    fn start(&mut self, selection: Selection, distance: u64) -> Result<PerfEvent, Refusal> {
        PerfEvent::open(self.pmu, selection, distance.min(FAR))
            .and_then(|event| event.signal_this_thread(self.signal).map(|()| event))
            .map_err(|error| Refusal(error.to_string()))
    }

    fn now(&self) -> Duration {
        self.epoch.elapsed()
    }

    fn may_repeat(&mut self, interval: Duration) -> bool {
        let now = Instant::now();
        if now.duration_since(self.pace_read) >= Duration::from_secs(1) {
            (self.pace, self.pace_read) = (pace(), now);
        }
        interval >= self.pace
    }
}

impl Backing for PerfEvent {
    fn count(&mut self) -> Count {
        self.read()
    }

    fn arm(&mut self, distance: u64) -> Result<(), Refusal> {
        self.set_period(distance.clamp(1, FAR)).map_err(|error| Refusal(error.to_string()))
    }
}
