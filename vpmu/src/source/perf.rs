//! The host's perf events: one for each counter, which counts this vCPU's thread while it is in the guest.
//!
//! Everything here belongs to the vCPU's own thread: its events count that thread, signal that thread, and can be read
//! without a system call by that thread only.

mod event;
mod obstacle;
mod page;
mod probe;

use std::time::{Duration, Instant};

use self::event::PerfEvent;
use super::{Backing, Count, FAR, Refusal, Source};
use crate::event::Selection;

pub use self::obstacle::Obstacle;
pub use self::probe::free_counters;

/// Makes perf events for the thread that it lives on.
pub struct PerfEvents {
    signal: libc::c_int,
    epoch: Instant,
}

impl PerfEvents {
    /// Events whose alarms send this signal.
    pub fn new(signal: libc::c_int) -> Self {
        Self { signal, epoch: Instant::now() }
    }
}

impl Source for PerfEvents {
    type Backing = PerfEvent;

    fn start(&mut self, selection: Selection, alarm: u64) -> Result<PerfEvent, Refusal> {
        PerfEvent::open(selection, alarm.min(FAR))
            .and_then(|event| event.signal_this_thread(self.signal).map(|()| event))
            .map_err(|error| Refusal(error.to_string()))
    }

    fn now(&self) -> Duration {
        self.epoch.elapsed()
    }
}

impl Backing for PerfEvent {
    fn count(&mut self) -> Count {
        self.read()
    }

    fn arm(&mut self, distance: u64) {
        self.set_period(distance.clamp(1, FAR));
    }
}
