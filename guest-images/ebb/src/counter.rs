//! The events that a thread opens for its branches.

use std::io;
use std::ops::Deref;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::Ordering::{Relaxed, Release};

use perf_event_open_sys::bindings::{self, perf_event_attr};
use perf_event_open_sys::{ioctls, perf_event_open};

use crate::block::{FLAG, Page, Slot};
use crate::entry;
use crate::error::Error;

/// Shortest period. The handler's own instructions count, too: with a period that it does not fit into, it would be
/// branched to for ever.
pub const SHORTEST_PERIOD: u64 = 1000;

/// An event by its raw code: `perf list` and the processor's manual have more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event(pub u64);

impl Event {
    /// Retired instructions, on processors of both vendors.
    pub const INSTRUCTIONS: Self = Self(0xc0);
    /// Cycles of AMD's processors.
    pub const AMD_CYCLES: Self = Self(0x76);
    /// Cycles of Intel's processors.
    pub const INTEL_CYCLES: Self = Self(0x3c);
    /// Retired branches of AMD's processors.
    pub const AMD_BRANCHES: Self = Self(0xc2);
    /// Retired branches of Intel's processors.
    pub const INTEL_BRANCHES: Self = Self(0xc4);

    /// Returns the description of this event, for `perf_event_open`.
    pub fn attr(self) -> perf_event_attr {
        let mut attr = perf_event_attr {
            type_: bindings::PERF_TYPE_RAW,
            size: u32::try_from(size_of::<perf_event_attr>()).expect("about a hundred bytes"),
            config: self.0 | FLAG,
            ..Default::default()
        };
        attr.set_disabled(1);
        attr.set_pinned(1);
        attr.set_exclusive(1);
        attr.set_exclude_kernel(1);
        attr.set_exclude_hv(1);
        attr
    }
}

/// Checks that an event can have branches. The kernel does not know them, so it cannot refuse what they do not have.
/// `task` and `cpu` are those of `perf_event_open`; `leads` says that the event is in no group, or is its group's
/// leader.
pub fn check(attr: &perf_event_attr, task: i32, cpu: i32, leads: bool) -> Result<(), Error> {
    // SAFETY: every event has a period or a frequency, and both are integers.
    let period = unsafe { attr.__bindgen_anon_1.sample_period };
    let faults = [
        (attr.type_ != bindings::PERF_TYPE_RAW, "the event is none of the processor's, by its raw code"),
        (attr.config & FLAG != FLAG, "the event's code has no flag"),
        (task < 0 || cpu >= 0, "the event has to be attached to a task, on any CPU"),
        (leads && attr.pinned() == 0, "the event has to be pinned"),
        (leads && attr.exclusive() == 0, "the event has to be exclusive"),
        (attr.exclude_kernel() == 0, "the event has to exclude the kernel"),
        (attr.inherit() != 0, "the event must not be inherited"),
        (attr.freq() != 0 || period != 0, "the event must not be sampled by the kernel"),
        (attr.enable_on_exec() != 0, "the event must not be enabled by exec"),
    ];
    faults.into_iter().find(|(is_wrong, _)| *is_wrong).map_or(Ok(()), |(_, why)| Err(Error::Refused(why)))
}

/// A slot of the thread's block: the thread wants branches for an event, whoever opens that for it.
pub struct SlotClaim<'a>(&'a Slot);

impl<'a> SlotClaim<'a> {
    pub(crate) fn new(page: &'a Page, event: Event, period: u64) -> Result<Self, Error> {
        if period < SHORTEST_PERIOD {
            return Err(Error::Refused("a period is 1,000 events at least"));
        }
        let code = event.attr().config;
        if page.slots.iter().any(|slot| slot.event.load(Relaxed) == code) {
            return Err(Error::NoSlot);
        }
        let slot = page.slots.iter().find(|slot| slot.event.load(Relaxed) == 0).ok_or(Error::NoSlot)?;
        for (word, value) in [(&slot.period, period), (&slot.left, 0), (&slot.overflows, 0)] {
            word.store(value, Relaxed);
        }
        slot.event.store(code, Release);
        Ok(Self(slot))
    }

    /// Returns the number of overflows.
    pub fn overflows(&self) -> u64 {
        self.0.overflows.load(Relaxed)
    }

    /// Returns the number of events until the next overflow, as of the last stop or overflow. 0 if nobody has served
    /// the slot.
    pub fn left(&self) -> u64 {
        self.0.left.load(Relaxed)
    }

    /// Sets the number of events from an overflow to the next, from the next on. A short one is taken as the shortest.
    pub fn set_period(&self, period: u64) {
        self.0.period.store(period.max(SHORTEST_PERIOD), Relaxed);
    }
}

impl Drop for SlotClaim<'_> {
    fn drop(&mut self) {
        self.0.event.store(0, Relaxed);
    }
}

/// An open event of the thread's, for which it wants branches.
pub struct Counter<'a> {
    file: OwnedFd,
    /// Its slot, which is freed after the event was closed.
    claim: SlotClaim<'a>,
    page: &'a Page,
}

impl<'a> Counter<'a> {
    /// Opens an event for the calling thread, in the group of `leader` or as a leader.
    pub(crate) fn open(
        page: &'a Page,
        event: Event,
        period: u64,
        leader: Option<&Counter<'_>>,
    ) -> Result<Self, Error> {
        let mut attr = event.attr();
        if leader.is_some() {
            attr.set_pinned(0);
            attr.set_exclusive(0);
            attr.set_disabled(0);
        }
        check(&attr, 0, -1, leader.is_none())?;
        let claim = SlotClaim::new(page, event, period)?;
        let group = leader.map_or(-1, |leader| leader.file.as_raw_fd());
        // SAFETY: `attr` is a valid description of its own size.
        let fd =
            unsafe { perf_event_open(&raw mut attr, 0, -1, group, bindings::PERF_FLAG_FD_CLOEXEC.into()) };
        if fd < 0 {
            return Err(Error::last("open the event"));
        }
        // SAFETY: the kernel has just returned this file, which nobody else owns.
        let file = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { file, claim, page })
    }

    /// Starts counting, with the other events of the group. Fails if nobody serves the thread's block.
    pub fn enable(&self) -> Result<(), Error> {
        self.request(ioctls::ENABLE, "enable the event")?;
        if self.left() == 0 {
            let has_counter = self.count()?.is_some();
            let _ = self.disable();
            return Err(if has_counter { Error::NotOffered } else { Error::NoCounter });
        }
        Ok(())
    }

    /// Stops counting. If branches are enabled, an overflow whose branch has not come by now is handled: the interrupts
    /// of real processors are late, and there is none once the event stands still.
    pub fn disable(&self) -> Result<(), Error> {
        self.request(ioctls::DISABLE, "disable the event")?;
        entry::take_late(self.page);
        Ok(())
    }

    fn request(&self, request: unsafe fn(i32, u32) -> i32, action: &'static str) -> Result<(), Error> {
        // SAFETY: these requests take a number, and access no memory.
        let status = unsafe { request(self.file.as_raw_fd(), bindings::PERF_IOC_FLAG_GROUP) };
        if status < 0 { Err(Error::last(action)) } else { Ok(()) }
    }

    /// Returns how often the event has happened, as the kernel counts it. `None` if the kernel has no counter for it:
    /// it is at the end of its file.
    pub fn count(&self) -> Result<Option<u64>, Error> {
        let mut count = 0_u64;
        let size = size_of::<u64>();
        // SAFETY: `count` has room for what is read.
        match unsafe { libc::read(self.file.as_raw_fd(), (&raw mut count).cast(), size) } {
            0 => Ok(None),
            read if usize::try_from(read) == Ok(size) => Ok(Some(count)),
            _ => Err(Error::System { action: "read the event", source: io::Error::last_os_error() }),
        }
    }
}

impl<'a> Deref for Counter<'a> {
    type Target = SlotClaim<'a>;

    fn deref(&self) -> &SlotClaim<'a> {
        &self.claim
    }
}

impl Drop for Counter<'_> {
    /// Stops counting, as [`Self::disable`] does.
    fn drop(&mut self) {
        let _ = self.disable();
    }
}

impl AsRawFd for Counter<'_> {
    fn as_raw_fd(&self) -> i32 {
        self.file.as_raw_fd()
    }
}
