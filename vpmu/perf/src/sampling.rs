//! Samples what a vCPU's thread does in the guest, for the host's own use: an event that takes a free counter only, and
//! signals its thread at each overflow ([`SAMPLE_SIGNAL`](crate::SAMPLE_SIGNAL)). The thread then looks at its guest.

use std::io;
use std::os::fd::OwnedFd;

use perf_event_open_sys::bindings::{PERF_COUNT_SW_CPU_CLOCK, PERF_TYPE_SOFTWARE};

use crate::attribution::{Reading, read};
use crate::host::HostPmu;
use crate::request::{Encoded, Purpose, Rate, Request, this_thread};
use vpmu::event::{Event, Filter};

/// An event that samples the guest of the thread that has opened it.
#[derive(Debug)]
pub struct Sampling(OwnedFd);

impl Sampling {
    /// The clock of a thread's run time (`cpu-clock`), which needs no counter. It also runs while the host's kernel
    /// works for the guest, and does not know the guest's privilege levels. None of its samples is taken in user mode
    /// of the host.
    pub const CLOCK: Encoded = (PERF_TYPE_SOFTWARE, PERF_COUNT_SW_CPU_CLOCK as u64);

    /// Begins to sample an event of this thread's guest, at these privilege levels.
    pub fn of_this_thread(event: Encoded, filter: Filter, rate: Rate) -> io::Result<Self> {
        let purpose = Purpose::Sampling { filter, rate };
        Request { event, thread: this_thread(), purpose }.open().map(Self)
    }

    /// Returns `type` and `config` by which the host's kernel knows an event.
    pub fn encoding(pmu: HostPmu, event: Event) -> io::Result<Encoded> {
        pmu.encode(event)
    }

    /// Returns what was counted so far, and for how long there was a counter.
    pub fn read(&self) -> Option<Reading> {
        read(&self.0)
    }
}
