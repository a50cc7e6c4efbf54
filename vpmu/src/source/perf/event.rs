//! One perf event: opening it, reading it, setting its period.

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use perf_event_open_sys as sys;
use sys::bindings::{
    PERF_FLAG_FD_CLOEXEC, PERF_FORMAT_TOTAL_TIME_ENABLED, PERF_FORMAT_TOTAL_TIME_RUNNING, perf_event_attr,
};

use super::host::HostPmu;
use super::page::Page;
use crate::event::{Event, Filter, Selection};
use crate::source::{Count, FAR};

/// A pinned event of this thread that counts in the guest only.
pub struct PerfEvent {
    fd: OwnedFd,
    page: Option<Page>,
    /// What was counted when it was last read.
    last: u64,
    /// For how long it was enabled without counting, as of the last reading by system call.
    missed: u64,
    /// When it was last tried to have it counted again.
    tried: Option<Instant>,
    /// It means something on the thread that opened it only.
    _this_thread: PhantomData<*const ()>,
}

/// What `read` gives in our format.
#[repr(C)]
#[derive(Default)]
struct Reading {
    value: u64,
    enabled: u64,
    running: u64,
}

impl PerfEvent {
    /// Opens it; it counts at once.
    pub fn open(pmu: HostPmu, selection: Selection, period: u64) -> io::Result<Self> {
        let mut attr = attributes(period);
        (attr.type_, attr.config) = pmu.encode(selection.event)?;
        attr.set_exclude_user((selection.filter == Filter::Kernel).into());
        attr.set_exclude_kernel((selection.filter == Filter::User).into());
        Self::from_attributes(attr)
    }

    /// Opens one that nobody waits for, to see whether there is room for it.
    pub fn sample(pmu: HostPmu, event: Event) -> io::Result<Self> {
        let mut attr = attributes(FAR);
        (attr.type_, attr.config) = pmu.encode(event)?;
        Self::from_attributes(attr)
    }

    /// The same of one of the kernel's generic events, by its number.
    pub fn generic(pmu: HostPmu, number: u64) -> io::Result<Self> {
        let mut attr = attributes(FAR);
        (attr.type_, attr.config) = pmu.generic(number);
        Self::from_attributes(attr)
    }

    fn from_attributes(mut attr: perf_event_attr) -> io::Result<Self> {
        const THIS_THREAD: libc::pid_t = 0;
        const ANY_CPU: libc::c_int = -1;
        const NO_GROUP: libc::c_int = -1;
        let flags = PERF_FLAG_FD_CLOEXEC.into();
        // SAFETY: `attr` is initialised, its size is that of its type, and it asks for no memory to be written.
        let fd = unsafe { sys::perf_event_open(&raw mut attr, THIS_THREAD, ANY_CPU, NO_GROUP, flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and nobody else has it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // Without its page (too much locked memory, say) it can still be read by a system call.
        let page = Page::map(&fd).ok();
        Ok(Self { fd, page, last: 0, missed: 0, tried: None, _this_thread: PhantomData })
    }

    /// Has every overflow send a signal to this thread, and to no other.
    pub fn signal_this_thread(&self, signal: libc::c_int) -> io::Result<()> {
        #[repr(C)]
        struct Owner {
            kind: libc::c_int,
            id: libc::pid_t,
        }
        const F_SETSIG: libc::c_int = 10;
        const F_SETOWN_EX: libc::c_int = 15;
        const F_OWNER_TID: libc::c_int = 0;
        let fd = self.fd.as_raw_fd();
        // SAFETY: takes nothing.
        let id = unsafe { libc::gettid() };
        let owner = Owner { kind: F_OWNER_TID, id };
        // SAFETY: `owner` has the layout of `f_owner_ex`, and is only read.
        done(unsafe { libc::fcntl(fd, F_SETOWN_EX, &raw const owner) })?;
        // SAFETY: takes a number.
        done(unsafe { libc::fcntl(fd, F_SETSIG, signal) })?;
        // SAFETY: takes flags; those that an event has are these.
        done(unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_ASYNC | libc::O_NONBLOCK) })
    }

    /// What was counted so far.
    pub fn read(&mut self) -> Count {
        if let Some(count) = self.page.as_ref().and_then(Page::read) {
            self.last = self.last.max(count);
            return Count::Exact(self.last);
        }
        // This thread runs, so the event should be on the PMU: either it cannot be read directly, or others hold the PMU.
        let Some(reading) = self.read_by_call() else {
            self.try_again();
            return Count::Starved(self.last);
        };
        self.last = self.last.max(reading.value);
        let missed = reading.enabled.saturating_sub(reading.running);
        if missed > std::mem::replace(&mut self.missed, missed) {
            Count::Starved(self.last)
        } else {
            Count::Exact(self.last)
        }
    }

    /// The next overflow comes in so many counts, and then again and again.
    pub fn set_period(&self, period: u64) -> io::Result<()> {
        // SAFETY: the kernel reads a number there.
        let result =
            unsafe { libc::ioctl(self.fd.as_raw_fd(), sys::bindings::PERIOD.into(), &raw const period) };
        done(result)
    }

    /// What it has counted; a pinned event that found no room has nothing to read.
    pub fn counted(&self) -> Option<u64> {
        self.read_by_call().map(|reading| reading.value)
    }

    /// An event for which there was no room is in error state until it is enabled again. Linux since 6.15 sends a
    /// signal when that fails, so a thread that tried at every signal would do nothing else.
    fn try_again(&mut self) {
        const PAUSE: Duration = Duration::from_millis(10);
        let now = Instant::now();
        if self.tried.is_some_and(|tried| now.duration_since(tried) < PAUSE) {
            return;
        }
        self.tried = Some(now);
        // SAFETY: takes no pointer.
        unsafe { sys::ioctls::ENABLE(self.fd.as_raw_fd(), 0) };
    }

    fn read_by_call(&self) -> Option<Reading> {
        let mut reading = Reading::default();
        let size = size_of::<Reading>();
        // SAFETY: `reading` is valid for `size` bytes.
        let count = unsafe { libc::read(self.fd.as_raw_fd(), (&raw mut reading).cast(), size) };
        (usize::try_from(count) == Ok(size)).then_some(reading)
    }
}

fn attributes(period: u64) -> perf_event_attr {
    let size = u32::try_from(size_of::<perf_event_attr>()).expect("it is small");
    let mut attr = perf_event_attr { size, ..Default::default() };
    attr.sample_period = period;
    attr.read_format = u64::from(PERF_FORMAT_TOTAL_TIME_ENABLED | PERF_FORMAT_TOTAL_TIME_RUNNING);
    attr.set_pinned(1);
    attr.set_exclude_host(1);
    attr.set_exclude_hv(1);
    attr
}

fn done(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
