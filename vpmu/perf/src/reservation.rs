//! Keeps the host's PMU in use while a guest's counters come and go.
//!
//! Linux on x86 takes the PMU's registers when the first hardware event of all is opened, and gives them back when the
//! last is closed (`x86_reserve_hardware` and `x86_release_hardware`, arch/x86/events/core.c). On Intel's processors it
//! allocates and frees buffers for the debug store of every CPU then. A guest that changes a counter's event at each
//! write would cause that at each write, if no other event is open on the host.

use std::io;
use std::os::fd::OwnedFd;

use vpmu::event::{Event, GenericEvent};

use crate::host::HostPmu;
use crate::request::{Encoded, Purpose, Request, this_thread};

/// An open event that never counts, and so takes no counter. While it exists, the host's PMU is in use. Other hosts
/// than those of x86 gain nothing from it, and lose nothing.
#[derive(Debug)]
pub struct Reservation {
    #[expect(dead_code, reason = "it is kept open")]
    event: OwnedFd,
}

impl Reservation {
    /// Opens the event for the current thread.
    pub fn new(pmu: HostPmu) -> io::Result<Self> {
        Self::of(pmu.encode(Event::Generic(GenericEvent::Instructions))?)
    }

    fn of(event: Encoded) -> io::Result<Self> {
        let request = Request { event, thread: this_thread(), purpose: Purpose::Reservation };
        Ok(Self { event: request.open()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use perf_event_open_sys::bindings::{PERF_COUNT_SW_DUMMY, PERF_TYPE_SOFTWARE};
    use std::fs;

    /// Returns the number of perf events that this process has open.
    fn open_events() -> usize {
        let files = fs::read_dir("/proc/self/fd").unwrap().filter_map(Result::ok);
        let links = files.filter_map(|file| fs::read_link(file.path()).ok());
        links.filter(|link| link.to_str() == Some("anon_inode:[perf_event]")).count()
    }

    #[test]
    fn the_event_stays_open_while_those_of_counters_are_closed() {
        // Every host has this event, and it is opened in the same way.
        let event = (PERF_TYPE_SOFTWARE, PERF_COUNT_SW_DUMMY.into());
        let before = open_events();
        let reservation = Reservation::of(event).unwrap();
        let counter = Reservation::of(event).unwrap();
        assert_eq!(open_events(), before + 2);
        drop(counter);
        assert_eq!(open_events(), before + 1);
        drop(reservation);
        assert_eq!(open_events(), before);
    }
}
