//! Who a vCPU's thread works for: what it does in the guest beside what it does for it on the host. These events take turns
//! with others, so that they never take a counter from the guest's pinned ones; where there is no room, they say so.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use perf_event_open_sys as sys;
use sys::bindings::{
    PERF_FLAG_FD_CLOEXEC, PERF_FORMAT_TOTAL_TIME_ENABLED, PERF_FORMAT_TOTAL_TIME_RUNNING, perf_event_attr,
};

use crate::host::HostPmu;
use vpmu::event::{Event, Meaning};

/// Events of another thread of this process.
#[derive(Debug)]
pub struct Attribution {
    guest: Pair,
    host: Pair,
}

#[derive(Debug, Default)]
struct Pair {
    instructions: Option<OwnedFd>,
    cycles: Option<OwnedFd>,
}

/// What they have counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Attributed {
    /// While the thread was in the guest.
    pub guest: Work,
    /// While it was not.
    pub host: Work,
}

/// What a thread did on one side.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// Instructions that retired; none if there is no room for them.
    pub instructions: Option<Reading>,
    /// Cycles of the core, as those.
    pub cycles: Option<Reading>,
}

/// What one event has counted, and for which part of its time: that of the thread, in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reading {
    /// The count.
    pub value: u64,
    /// For how long it was to count.
    pub enabled: u64,
    /// For how long it did.
    pub running: u64,
}

/// Where an event counts.
#[derive(Debug, Clone, Copy)]
enum Side {
    Guest,
    Host,
}

impl Attribution {
    /// Begins to count what a thread does, with as many events as there is room for: if all of them took turns in too
    /// little room, none would have counted all the time.
    pub fn of(pmu: HostPmu, thread: libc::pid_t, room: usize) -> io::Result<Self> {
        let mut left = room;
        let mut open = |side, meaning| -> io::Result<Option<OwnedFd>> {
            let Some(fewer) = left.checked_sub(1) else { return Ok(None) };
            left = fewer;
            open(pmu, thread, side, meaning).map(Some)
        };
        let mut attribution = Self { guest: Pair::default(), host: Pair::default() };
        attribution.guest.instructions = open(Side::Guest, Meaning::Instructions)?;
        attribution.host.instructions = open(Side::Host, Meaning::Instructions)?;
        attribution.guest.cycles = open(Side::Guest, Meaning::Cycles)?;
        attribution.host.cycles = open(Side::Host, Meaning::Cycles)?;
        Ok(attribution)
    }

    /// What was counted so far.
    pub fn read(&self) -> Attributed {
        Attributed { guest: self.guest.read(), host: self.host.read() }
    }
}

impl Pair {
    fn read(&self) -> Work {
        let read = |event: &Option<OwnedFd>| event.as_ref().and_then(read);
        Work { instructions: read(&self.instructions), cycles: read(&self.cycles) }
    }
}

impl Reading {
    /// What was counted since then.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            value: self.value.saturating_sub(before.value),
            enabled: self.enabled.saturating_sub(before.enabled),
            running: self.running.saturating_sub(before.running),
        }
    }

    /// The count, if it counted all the time.
    pub fn exact(self) -> Option<u64> {
        (self.running >= self.enabled).then_some(self.value)
    }
}

fn open(pmu: HostPmu, thread: libc::pid_t, side: Side, meaning: Meaning) -> io::Result<OwnedFd> {
    const ANY_CPU: libc::c_int = -1;
    const NO_GROUP: libc::c_int = -1;
    let mut attr = perf_event_attr::default();
    attr.size = u32::try_from(size_of_val(&attr)).expect("it is small");
    (attr.type_, attr.config) = pmu.encode(Event::Meaning(meaning))?;
    attr.read_format = u64::from(PERF_FORMAT_TOTAL_TIME_ENABLED | PERF_FORMAT_TOTAL_TIME_RUNNING);
    attr.set_exclude_hv(1);
    match side {
        Side::Guest => attr.set_exclude_host(1),
        Side::Host => attr.set_exclude_guest(1),
    }
    let flags = PERF_FLAG_FD_CLOEXEC.into();
    // SAFETY: `attr` is initialised, its size is that of its type, and it asks for no memory to be written.
    let fd = unsafe { sys::perf_event_open(&raw mut attr, thread, ANY_CPU, NO_GROUP, flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn read(event: &OwnedFd) -> Option<Reading> {
    let mut numbers = [0_u64; 3];
    let size = size_of_val(&numbers);
    // SAFETY: `numbers` is valid for `size` bytes.
    let count = unsafe { libc::read(event.as_raw_fd(), numbers.as_mut_ptr().cast(), size) };
    let [value, enabled, running] = numbers;
    (usize::try_from(count) == Ok(size)).then_some(Reading { value, enabled, running })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_did_not_count_all_the_time_is_no_count() {
        let reading = |value, enabled, running| Reading { value, enabled, running };
        assert_eq!(reading(7, 100, 100).exact(), Some(7));
        assert_eq!(reading(7, 100, 99).exact(), None);
        assert_eq!(reading(0, 0, 0).exact(), Some(0), "the thread did not run");
        assert_eq!(reading(9, 300, 200).since(reading(7, 100, 100)), reading(2, 200, 100));
    }

    #[test]
    fn without_room_nothing_is_opened() {
        let own = libc::pid_t::try_from(std::process::id()).unwrap();
        let pmu = HostPmu::settle().unwrap().0;
        assert_eq!(Attribution::of(pmu, own, 0).unwrap().read(), Attributed::default());
    }
}
