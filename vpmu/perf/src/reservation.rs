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
    #[cfg_attr(not(test), expect(dead_code, reason = "it is kept open"))]
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
    use std::os::fd::AsRawFd;

    /// Says whether the reservation's own descriptor is that of a perf event. The number of all events of this process
    /// would say more, but other tests open and close events in other threads meanwhile.
    fn is_open(reservation: &Reservation) -> bool {
        let link = fs::read_link(format!("/proc/self/fd/{}", reservation.event.as_raw_fd()));
        link.is_ok_and(|file| file.to_str() == Some("anon_inode:[perf_event]"))
    }

    #[test]
    fn the_event_stays_open_while_those_of_counters_are_closed() {
        // Every host has this event, and it is opened in the same way.
        let event = (PERF_TYPE_SOFTWARE, PERF_COUNT_SW_DUMMY.into());
        let reservation = Reservation::of(event).unwrap();
        let counter = Reservation::of(event).unwrap();
        assert!(is_open(&reservation) && is_open(&counter));
        drop(counter);
        assert!(is_open(&reservation));
    }
}
