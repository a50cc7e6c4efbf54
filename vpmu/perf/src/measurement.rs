//! Measures what this thread does in a guest, for the host's own use: it takes a free counter only, and signals nobody.

use std::io;
use std::os::fd::OwnedFd;

use crate::attribution::{Reading, read};
use crate::host::HostPmu;
use crate::request::{Purpose, Request, this_thread};
use vpmu::event::{Event, Filter};

/// An event that counts this thread's guest from when it was opened.
#[derive(Debug)]
pub struct Measurement(OwnedFd);

impl Measurement {
    /// Begins to count an event in the guest, at these privilege levels.
    pub fn of_this_thread(pmu: HostPmu, event: Event, filter: Filter) -> io::Result<Self> {
        let event = pmu.encode(event)?;
        Request { event, thread: this_thread(), purpose: Purpose::Measurement(filter) }.open().map(Self)
    }

    /// Returns what was counted, unless there was no counter for a part of the time.
    pub fn exact(&self) -> Option<u64> {
        read(&self.0).and_then(Reading::exact)
    }
}
