//! Attributes the work of a vCPU's thread to the guest and to the host: instructions and cycles on each side. These
//! events are not pinned, so that they never take a hardware counter from the guest's pinned events. If the host
//! multiplexes them, their running time is shorter than their enabled time.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use crate::host::HostPmu;
use crate::request::{Purpose, Request, Side};
use vpmu::event::{Event, GenericEvent};

/// Events that count a vCPU's thread, opened by another thread of the same process.
#[derive(Debug)]
pub struct Attribution {
    guest: Events,
    host: Events,
}

/// The events of one side.
#[derive(Debug, Default)]
struct Events {
    instructions: Option<OwnedFd>,
    cycles: Option<OwnedFd>,
}

/// What an [`Attribution`] has counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Attributed {
    /// Counts while the thread ran the guest.
    pub guest: Work,
    /// Counts while the thread ran in the host, in user mode or in the kernel.
    pub host: Work,
}

/// What a thread did on one side: in the guest, or in the host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// Retired instructions; `None` if there was no free counter for the event.
    pub instructions: Option<Reading>,
    /// Core cycles; `None` if there was no free counter for the event.
    pub cycles: Option<Reading>,
}

/// Count of one event, with its enabled and running times as perf defines them. Both are CPU times of the thread, in
/// nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reading {
    /// The count.
    pub value: u64,
    /// Time for which the event was enabled.
    pub enabled: u64,
    /// Time for which the event was on the PMU.
    pub running: u64,
}

impl Attribution {
    /// Begins to count what `thread` does, with at most `free_counters` events. If there were more events than free
    /// counters, the host would multiplex all of them, and none would have an exact count.
    pub fn of(pmu: HostPmu, thread: libc::pid_t, free_counters: usize) -> io::Result<Self> {
        let mut left = free_counters;
        let mut open = |side, generic| -> io::Result<Option<OwnedFd>> {
            let Some(fewer) = left.checked_sub(1) else { return Ok(None) };
            left = fewer;
            open(pmu, thread, side, generic).map(Some)
        };
        let mut attribution = Self { guest: Events::default(), host: Events::default() };
        attribution.guest.instructions = open(Side::Guest, GenericEvent::Instructions)?;
        attribution.host.instructions = open(Side::Host, GenericEvent::Instructions)?;
        attribution.guest.cycles = open(Side::Guest, GenericEvent::Cycles)?;
        attribution.host.cycles = open(Side::Host, GenericEvent::Cycles)?;
        Ok(attribution)
    }

    /// Reads what was counted so far.
    pub fn read(&self) -> Attributed {
        Attributed { guest: self.guest.read(), host: self.host.read() }
    }
}

impl Events {
    fn read(&self) -> Work {
        let read = |event: &Option<OwnedFd>| event.as_ref().and_then(read);
        Work { instructions: read(&self.instructions), cycles: read(&self.cycles) }
    }
}

impl Reading {
    /// Returns what was counted since an earlier reading of the same event.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            value: self.value.saturating_sub(before.value),
            enabled: self.enabled.saturating_sub(before.enabled),
            running: self.running.saturating_sub(before.running),
        }
    }

    /// Returns the count, unless the event was off the PMU for a part of its time.
    pub fn exact(self) -> Option<u64> {
        (self.running >= self.enabled).then_some(self.value)
    }
}

fn open(pmu: HostPmu, thread: libc::pid_t, side: Side, generic: GenericEvent) -> io::Result<OwnedFd> {
    let event = pmu.encode(Event::Generic(generic))?;
    Request { event, thread, purpose: Purpose::Attribution(side) }.open()
}

/// Reads a count with its times.
pub fn read(event: &OwnedFd) -> Option<Reading> {
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
    fn an_event_that_was_off_the_pmu_for_a_time_has_no_exact_count() {
        let reading = |value, enabled, running| Reading { value, enabled, running };
        assert_eq!(reading(7, 100, 100).exact(), Some(7));
        assert_eq!(reading(7, 100, 99).exact(), None);
        assert_eq!(reading(0, 0, 0).exact(), Some(0), "the thread did not run");
        assert_eq!(reading(9, 300, 200).since(reading(7, 100, 100)), reading(2, 200, 100));
    }

    #[test]
    fn without_free_counters_nothing_is_opened() {
        let own = libc::pid_t::try_from(std::process::id()).unwrap();
        let pmu = HostPmu::bind_thread().unwrap().0;
        assert_eq!(Attribution::of(pmu, own, 0).unwrap().read(), Attributed::default());
    }
}
