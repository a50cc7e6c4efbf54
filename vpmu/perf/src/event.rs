//! One perf event: opening it, reading it, config its period.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::rc::Rc;
use std::time::{Duration, Instant};

use perf_event_open_sys as sys;
use sys::bindings::{
    PERF_FLAG_FD_CLOEXEC, PERF_FORMAT_TOTAL_TIME_ENABLED, PERF_FORMAT_TOTAL_TIME_RUNNING, perf_event_attr,
};

use crate::estimate::Estimate;
use crate::host::HostPmu;
use crate::page::{Left, Page};
use vpmu::event::{Event, Filter, Scope, Selection};
use vpmu::report::BackingReport;
use vpmu::source::{Count, FAR};

/// How many system calls were made for a thread's events.
#[derive(Clone, Default)]
pub struct Calls(Rc<Cell<u64>>);

impl Calls {
    /// The number.
    pub fn number(&self) -> u64 {
        self.0.get()
    }

    fn made(&self, calls: u64) {
        self.0.set(self.0.get().wrapping_add(calls));
    }
}

/// Whose privilege levels an event leaves out that is to leave out the user's, or the kernel's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Levels {
    /// Those of the guest and of the host alike.
    Both,
    /// The guest's, if that is asked for, and else the host's: on RISC-V (`pmu_sbi_get_filter_flags` in Linux).
    One,
}

/// What this host's kernel does.
const LEVELS: Levels = if cfg!(target_arch = "riscv64") { Levels::One } else { Levels::Both };

impl Levels {
    /// Has an event count at these levels, and then.
    fn restrict(self, attr: &mut perf_event_attr, filter: Filter, scope: Scope) {
        /// "`RISCV_PMU_CONFIG1_GUEST_EVENTS`", which goes with events of every type.
        const OF_THE_GUEST: u64 = 1;
        attr.set_exclude_user((filter == Filter::Kernel).into());
        attr.set_exclude_kernel((filter == Filter::User).into());
        attr.set_exclude_host((scope == Scope::Guest).into());
        if self == Self::One {
            attr.__bindgen_anon_3.config1 = OF_THE_GUEST;
            // The hypervisor is then the host's kernel. Its programs cannot be left out by themselves, so what counts a guest's
            // kernel and the work for it has this process's own work in user mode, too.
            attr.set_exclude_hv((filter == Filter::User || scope == Scope::Guest).into());
        }
    }
}

/// A pinned event of this thread. It means something on the thread that opened it only, and stays there.
pub struct PerfEvent {
    fd: OwnedFd,
    page: Option<Page>,
    /// What was counted when it was last read.
    last: u64,
    /// For how long it was enabled without counting, as of the last reading by system call.
    missed: u64,
    /// When it was last tried to have it counted again.
    tried: Option<Instant>,
    /// Whether it was found to have no room on the PMU when it was last looked at.
    was_off: bool,
    /// Kept where it is asked for.
    estimate: Option<Estimate>,
    calls: Calls,
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
    pub fn open(pmu: HostPmu, selection: Selection, period: u64, calls: Calls) -> io::Result<Self> {
        let mut attr = attributes(period);
        (attr.type_, attr.config) = pmu.encode(selection.event)?;
        LEVELS.restrict(&mut attr, selection.filter, selection.scope);
        Self::from_attributes(attr, calls)
    }

    /// Opens one that nobody waits for, to see whether there is room for it.
    pub fn sample(pmu: HostPmu, event: Event) -> io::Result<Self> {
        let mut attr = attributes(FAR);
        (attr.type_, attr.config) = pmu.encode(event)?;
        Self::from_attributes(attr, Calls::default())
    }

    /// Opens one that counts nothing and takes nobody's room, to see whether there is such an event.
    pub fn trial(pmu: HostPmu, event: Event, calls: Calls) -> io::Result<Self> {
        let mut attr = attributes(FAR);
        attr.set_pinned(0);
        attr.set_disabled(1);
        (attr.type_, attr.config) = pmu.encode(event)?;
        Self::from_attributes(attr, calls)
    }

    /// The same as [`Self::sample`] of one of the kernel's generic events, by its number.
    pub fn generic(pmu: HostPmu, number: u64) -> io::Result<Self> {
        let mut attr = attributes(FAR);
        (attr.type_, attr.config) = pmu.generic(number);
        Self::from_attributes(attr, Calls::default())
    }

    fn from_attributes(mut attr: perf_event_attr, calls: Calls) -> io::Result<Self> {
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
        calls.made(2);
        Ok(Self { fd, page, last: 0, missed: 0, tried: None, was_off: false, estimate: None, calls })
    }

    /// Adds to its count, from now on, an estimate of what it misses without hardware.
    pub fn estimate(&mut self) {
        self.estimate = Some(Estimate::new());
    }

    /// Has every overflow send `SIGIO` to this thread, and to no other. However many events do, one waits at most.
    pub fn signal_this_thread(&self) -> io::Result<()> {
        #[repr(C)]
        struct Owner {
            kind: libc::c_int,
            id: libc::pid_t,
        }
        const F_SETOWN_EX: libc::c_int = 15;
        const F_OWNER_TID: libc::c_int = 0;
        let fd = self.fd.as_raw_fd();
        // SAFETY: takes nothing.
        let id = unsafe { libc::gettid() };
        let owner = Owner { kind: F_OWNER_TID, id };
        // SAFETY: `owner` has the layout of `f_owner_ex`, and is only read.
        done(unsafe { libc::fcntl(fd, F_SETOWN_EX, &raw const owner) })?;
        // SAFETY: takes flags; those that an event has are these.
        done(unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_ASYNC | libc::O_NONBLOCK) })?;
        self.calls.made(2);
        Ok(())
    }

    /// What was counted so far, and is estimated to have been missed.
    pub fn read(&mut self) -> Count {
        let count = self.read_exactly();
        if self.estimate.is_some() { self.with_estimate(count) } else { count }
    }

    fn read_exactly(&mut self) -> Count {
        let was_off = std::mem::take(&mut self.was_off);
        if let Some(count) = self.read_directly() {
            return Count::Exact(count);
        }
        // This thread runs, so the event should be on the PMU: either it cannot be read directly, or others hold the PMU.
        let Some(reading) = self.read_by_call() else {
            // What it had counted until then is known all the same.
            self.last = self.left().map_or(self.last, |left| self.last.max(left.count));
            self.try_again();
            // That it was off is told once, even if it is over by now.
            return match self.read_directly() {
                Some(count) if was_off => Count::Exact(count),
                _ => {
                    self.was_off = true;
                    Count::Starved(self.last)
                }
            };
        };
        self.last = self.last.max(reading.value);
        let missed = reading.enabled.saturating_sub(reading.running);
        if missed > std::mem::replace(&mut self.missed, missed) {
            Count::Starved(self.last)
        } else {
            Count::Exact(self.last)
        }
    }

    /// What was counted, if that can be read without a system call.
    fn read_directly(&mut self) -> Option<u64> {
        let count = self.page.as_ref()?.read()?;
        self.last = self.last.max(count);
        Some(self.last)
    }

    fn with_estimate(&mut self, count: Count) -> Count {
        let Some(mut estimate) = self.estimate.take() else { return count };
        match count {
            Count::Exact(_) => estimate.counts(|| self.read_by_call().map(|reading| reading.enabled)),
            Count::Starved(_) => {
                if let Some(left) = self.left() {
                    estimate.starved(left);
                }
            }
        }
        let missed = self.estimate.insert(estimate).missed();
        match count {
            Count::Exact(count) => Count::Exact(count.saturating_add(missed)),
            Count::Starved(count) => Count::Starved(count.saturating_add(missed)),
        }
    }

    /// How much of the count is an estimate.
    pub fn estimated(&self) -> u64 {
        self.estimate.as_ref().map_or(0, Estimate::missed)
    }

    /// Where it is, and for how long it has counted.
    pub fn report(&self) -> BackingReport {
        let hardware = self.page.as_ref().and_then(Page::hardware);
        let times = self.read_by_call().map(|reading| (reading.enabled, reading.running));
        let (enabled_ns, running_ns) =
            times.or_else(|| self.left().map(|left| (left.enabled, left.running))).unwrap_or((0, 0));
        BackingReport { hardware, enabled_ns, running_ns }
    }

    fn left(&self) -> Option<Left> {
        self.page.as_ref().and_then(Page::left)
    }

    /// The next overflow comes in so many counts, and then again and again.
    pub fn set_period(&self, period: u64) -> io::Result<()> {
        // SAFETY: the kernel reads a number there.
        let result =
            unsafe { libc::ioctl(self.fd.as_raw_fd(), sys::bindings::PERIOD.into(), &raw const period) };
        self.calls.made(1);
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
        self.calls.made(1);
    }

    fn read_by_call(&self) -> Option<Reading> {
        let mut reading = Reading::default();
        let size = size_of::<Reading>();
        // SAFETY: `reading` is valid for `size` bytes.
        let count = unsafe { libc::read(self.fd.as_raw_fd(), (&raw mut reading).cast(), size) };
        self.calls.made(1);
        (usize::try_from(count) == Ok(size)).then_some(reading)
    }
}

impl Drop for PerfEvent {
    fn drop(&mut self) {
        // Its page and its descriptor go.
        self.calls.made(1 + u64::from(self.page.is_some()));
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

#[cfg(test)]
mod tests {
    use super::*;

    /// What is left out of the user, the kernel, the hypervisor and the host, and what is said beside that.
    fn restricted(levels: Levels, filter: Filter, scope: Scope) -> ([u64; 4], u64) {
        let mut attr = attributes(FAR);
        levels.restrict(&mut attr, filter, scope);
        let left_out = [attr.exclude_user(), attr.exclude_kernel(), attr.exclude_hv(), attr.exclude_host()];
        // SAFETY: all of the union are numbers.
        (left_out, unsafe { attr.__bindgen_anon_3.config1 })
    }

    #[test]
    fn a_guests_levels_are_left_out_with_the_hosts_or_asked_for_by_themselves() {
        for (filter, [user, kernel]) in
            [(Filter::User, [0, 1]), (Filter::Kernel, [1, 0]), (Filter::All, [0, 0])]
        {
            assert_eq!(restricted(Levels::Both, filter, Scope::Guest), ([user, kernel, 1, 1], 0));
            assert_eq!(restricted(Levels::Both, filter, Scope::Thread), ([user, kernel, 1, 0], 0));
            assert_eq!(restricted(Levels::One, filter, Scope::Guest), ([user, kernel, 1, 1], 1));
            // In the host's kernel everything is counted but what is asked for of programs.
            let host_kernel = u64::from(filter == Filter::User);
            assert_eq!(restricted(Levels::One, filter, Scope::Thread), ([user, kernel, host_kernel, 0], 1));
        }
    }
}
