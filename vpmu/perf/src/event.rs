//! One perf event: opening it, reading it, setting its period.

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
use crate::page::{Page, ScheduledOut};
use vpmu::event::{Event, Filter, Scope, Selection};
use vpmu::report::BackingReport;
use vpmu::source::{Count, FAR};

/// Number of system calls made for the events of a thread, which share it.
#[derive(Clone, Default)]
pub struct SystemCalls(Rc<Cell<u64>>);

impl SystemCalls {
    /// Returns the number of system calls so far.
    pub fn count(&self) -> u64 {
        self.0.get()
    }

    fn add(&self, calls: u64) {
        self.0.set(self.0.get().wrapping_add(calls));
    }
}

/// What `exclude_user` and `exclude_kernel` of `perf_event_attr` exclude.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PrivilegeLevels {
    /// The privilege levels of the guest and of the host alike.
    GuestAndHost,
    /// The guest's privilege levels if `config1` says so, or else the host's: RISC-V (`pmu_sbi_get_filter_flags` in
    /// Linux).
    GuestOrHost,
}

/// What this host's kernel excludes.
const LEVELS: PrivilegeLevels =
    if cfg!(target_arch = "riscv64") { PrivilegeLevels::GuestOrHost } else { PrivilegeLevels::GuestAndHost };

impl PrivilegeLevels {
    /// Restricts an event to a filter's privilege levels and to a scope.
    fn restrict(self, attr: &mut perf_event_attr, filter: Filter, scope: Scope) {
        /// `RISCV_PMU_CONFIG1_GUEST_EVENTS`, which Linux takes with events of every type.
        const GUEST_EVENTS: u64 = 1;
        attr.set_exclude_user((filter == Filter::Kernel).into());
        attr.set_exclude_kernel((filter == Filter::User).into());
        attr.set_exclude_host((scope == Scope::Guest).into());
        if self == Self::GuestOrHost {
            attr.__bindgen_anon_3.config1 = GUEST_EVENTS;
            // With GUEST_EVENTS, `exclude_hv` excludes the host's kernel. The host's user mode cannot be excluded by
            // itself. So an event that counts a guest's kernel and the host's work for it also counts this process in
            // user mode.
            attr.set_exclude_hv((filter == Filter::User || scope == Scope::Guest).into());
        }
    }
}

/// Whether an event takes a counter from others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precedence {
    /// It takes a free counter only. Linux gives the counters to events of this kind in the order in which they were
    /// opened.
    Flexible,
    /// It takes a counter from a flexible event if none is free.
    Pinned,
}

/// A pinned perf event that counts the thread that opened it. It must be used and dropped on that thread.
pub struct PerfEvent {
    fd: OwnedFd,
    /// The event's page; `None` if it could not be mapped.
    page: Option<Page>,
    /// Count at the last read.
    last_count: u64,
    /// Time for which the event was enabled but not on the PMU, at the last read by system call, in nanoseconds.
    unscheduled: u64,
    /// Time of the last attempt to get the event out of its error state.
    last_reenable: Option<Instant>,
    /// The event was in error state at the last read.
    was_in_error: bool,
    /// Estimate of the counts that were missed without hardware, if it was asked for.
    estimate: Option<Estimate>,
    system_calls: SystemCalls,
}

/// What `read` returns with the `read_format` of [`attributes`].
#[repr(C)]
#[derive(Default)]
struct Reading {
    value: u64,
    enabled: u64,
    running: u64,
}

impl PerfEvent {
    /// Opens an event, which counts at once and overflows every `period` counts.
    pub fn open(pmu: HostPmu, selection: Selection, period: u64, calls: SystemCalls) -> io::Result<Self> {
        let mut attr = attributes(period);
        (attr.type_, attr.config) = pmu.encode(selection.event)?;
        LEVELS.restrict(&mut attr, selection.filter, selection.scope);
        Self::from_attributes(attr, calls)
    }

    /// Opens an event of the guest that raises no signal, to find out whether a counter is free for it.
    pub fn open_probe(pmu: HostPmu, event: Event, precedence: Precedence) -> io::Result<Self> {
        let mut attr = attributes(FAR);
        attr.set_pinned((precedence == Precedence::Pinned).into());
        (attr.type_, attr.config) = pmu.encode(event)?;
        Self::from_attributes(attr, SystemCalls::default())
    }

    /// Opens a disabled event, which takes no counter, to find out whether the host has the event.
    pub fn open_disabled(pmu: HostPmu, event: Event, calls: SystemCalls) -> io::Result<Self> {
        let mut attr = attributes(FAR);
        attr.set_pinned(0);
        attr.set_disabled(1);
        (attr.type_, attr.config) = pmu.encode(event)?;
        Self::from_attributes(attr, calls)
    }

    /// Does the same as [`Self::open_disabled`] for one of the kernel's generic events, by its number (`enum
    /// perf_hw_id`).
    pub fn open_generic_disabled(pmu: HostPmu, number: u64) -> io::Result<Self> {
        let mut attr = attributes(FAR);
        attr.set_pinned(0);
        attr.set_disabled(1);
        (attr.type_, attr.config) = pmu.generic(number);
        Self::from_attributes(attr, SystemCalls::default())
    }

    fn from_attributes(mut attr: perf_event_attr, system_calls: SystemCalls) -> io::Result<Self> {
        let fd = open(&mut attr, THIS_THREAD)?;
        // If the page cannot be mapped (RLIMIT_MEMLOCK, for example), the event can still be read by a system call.
        let page = Page::map(&fd).ok();
        system_calls.add(2);
        Ok(Self {
            fd,
            page,
            last_count: 0,
            unscheduled: 0,
            last_reenable: None,
            was_in_error: false,
            estimate: None,
            system_calls,
        })
    }

    /// Adds to the count, from now on, an estimate of what the event misses without hardware.
    pub fn estimate(&mut self) {
        self.estimate = Some(Estimate::new());
    }

    /// Makes every overflow send `SIGIO` to this thread and to no other. `SIGIO` is no real-time signal, so at most one
    /// is pending however many events overflow.
    pub fn signal_this_thread(&self) -> io::Result<()> {
        #[repr(C)]
        struct Owner {
            kind: libc::c_int,
            id: libc::pid_t,
        }
        const F_SETOWN_EX: libc::c_int = 15;
        const F_OWNER_TID: libc::c_int = 0;
        let fd = self.fd.as_raw_fd();
        // Not libc's: the standard library refers to that one weakly, which a statically linked program optimised as a
        // whole may be left with, and then it calls address 0.
        let id = rustix::thread::gettid().as_raw_pid();
        let owner = Owner { kind: F_OWNER_TID, id };
        // SAFETY: `owner` has the layout of `f_owner_ex`, and is only read.
        to_result(unsafe { libc::fcntl(fd, F_SETOWN_EX, &raw const owner) })?;
        // SAFETY: `F_SETFL` takes flags and no pointer.
        to_result(unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_ASYNC | libc::O_NONBLOCK) })?;
        self.system_calls.add(2);
        Ok(())
    }

    /// Returns what was counted so far, plus the estimate of what was missed, if there is one.
    pub fn read(&mut self) -> Count {
        let count = self.read_exactly();
        if self.estimate.is_some() { self.with_estimate(count) } else { count }
    }

    fn read_exactly(&mut self) -> Count {
        let was_in_error = std::mem::take(&mut self.was_in_error);
        if let Some(count) = self.read_directly() {
            return Count::Exact(count);
        }
        // This thread runs, so the event should be on the PMU. Either it cannot be read directly, or others hold the
        // PMU.
        let Some(reading) = self.read_by_system_call() else {
            // The event is in error state. Its page still has what was counted before.
            self.last_count =
                self.scheduled_out().map_or(self.last_count, |state| self.last_count.max(state.count));
            self.reenable();
            // The starvation is reported once even if the event is back on the PMU by now.
            return match self.read_directly() {
                Some(count) if was_in_error => Count::Exact(count),
                _ => {
                    self.was_in_error = true;
                    Count::Starved(self.last_count)
                }
            };
        };
        self.last_count = self.last_count.max(reading.value);
        let unscheduled = reading.enabled.saturating_sub(reading.running);
        if unscheduled > std::mem::replace(&mut self.unscheduled, unscheduled) {
            Count::Starved(self.last_count)
        } else {
            Count::Exact(self.last_count)
        }
    }

    /// Returns what was counted, if it can be read without a system call.
    fn read_directly(&mut self) -> Option<u64> {
        let count = self.page.as_ref()?.read()?;
        self.last_count = self.last_count.max(count);
        Some(self.last_count)
    }

    fn with_estimate(&mut self, count: Count) -> Count {
        let Some(mut estimate) = self.estimate.take() else { return count };
        match count {
            Count::Exact(_) => {
                estimate.scheduled(|| self.read_by_system_call().map(|reading| reading.enabled));
            }
            Count::Starved(_) => {
                if let Some(state) = self.scheduled_out() {
                    estimate.starved(state);
                }
            }
        }
        let missed = self.estimate.insert(estimate).missed();
        match count {
            Count::Exact(count) => Count::Exact(count.saturating_add(missed)),
            Count::Starved(count) => Count::Starved(count.saturating_add(missed)),
        }
    }

    /// Returns how much of the count is an estimate.
    pub fn estimated(&self) -> u64 {
        self.estimate.as_ref().map_or(0, Estimate::missed)
    }

    /// Returns the event's hardware counter, and for how long it was enabled and counted.
    pub fn report(&self) -> BackingReport {
        let hardware = self.page.as_ref().and_then(Page::hardware);
        let times = self.read_by_system_call().map(|reading| (reading.enabled, reading.running));
        let (enabled_ns, running_ns) = times
            .or_else(|| self.scheduled_out().map(|state| (state.enabled, state.running)))
            .unwrap_or((0, 0));
        BackingReport { hardware, enabled_ns, running_ns }
    }

    fn scheduled_out(&self) -> Option<ScheduledOut> {
        self.page.as_ref().and_then(Page::scheduled_out)
    }

    /// Sets the period: the event overflows after `period` more counts, and then every `period` counts.
    pub fn set_period(&self, period: u64) -> io::Result<()> {
        // SAFETY: `PERF_EVENT_IOC_PERIOD` takes a pointer to a `u64`, which the kernel only reads.
        let result =
            unsafe { libc::ioctl(self.fd.as_raw_fd(), sys::bindings::PERIOD.into(), &raw const period) };
        self.system_calls.add(1);
        to_result(result)
    }

    /// Returns what was counted. Returns `None` for an event that found no free counter.
    pub fn counted(&self) -> Option<u64> {
        let reading = self.read_by_system_call()?;
        (reading.running > 0 && reading.running == reading.enabled).then_some(reading.value)
    }

    /// Enables the event again, because a pinned event that found no free counter stays in error state until then. Does
    /// nothing if that was tried a short time ago: Linux since 6.15 signals each failure, and a thread that tried again
    /// at every signal would do nothing else.
    fn reenable(&mut self) {
        const PAUSE: Duration = Duration::from_millis(10);
        let now = Instant::now();
        if self.last_reenable.is_some_and(|last| now.duration_since(last) < PAUSE) {
            return;
        }
        self.last_reenable = Some(now);
        // SAFETY: `PERF_EVENT_IOC_ENABLE` takes no pointer.
        unsafe { sys::ioctls::ENABLE(self.fd.as_raw_fd(), 0) };
        self.system_calls.add(1);
    }

    fn read_by_system_call(&self) -> Option<Reading> {
        let mut reading = Reading::default();
        let size = size_of::<Reading>();
        // SAFETY: `reading` is valid for `size` bytes.
        let count = unsafe { libc::read(self.fd.as_raw_fd(), (&raw mut reading).cast(), size) };
        self.system_calls.add(1);
        (usize::try_from(count) == Ok(size)).then_some(reading)
    }
}

impl Drop for PerfEvent {
    fn drop(&mut self) {
        // The file descriptor is closed, and the page is unmapped.
        self.system_calls.add(1 + u64::from(self.page.is_some()));
    }
}

/// The thread that opens an event, where another thread's id could be.
pub const THIS_THREAD: libc::pid_t = 0;

/// Opens an event that counts a thread on whatever CPU it runs.
pub fn open(attr: &mut perf_event_attr, thread: libc::pid_t) -> io::Result<OwnedFd> {
    const ANY_CPU: libc::c_int = -1;
    const NO_GROUP: libc::c_int = -1;
    let flags = PERF_FLAG_FD_CLOEXEC.into();
    // SAFETY: `attr` is initialised, its size is that of its type, and it asks for no memory to be written.
    let fd = unsafe { sys::perf_event_open(attr, thread, ANY_CPU, NO_GROUP, flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the file descriptor is new and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Returns the attributes of a pinned event that counts guests only.
fn attributes(period: u64) -> perf_event_attr {
    let size = u32::try_from(size_of::<perf_event_attr>()).expect("the structure is small");
    let mut attr = perf_event_attr { size, ..Default::default() };
    attr.sample_period = period;
    attr.read_format = u64::from(PERF_FORMAT_TOTAL_TIME_ENABLED | PERF_FORMAT_TOTAL_TIME_RUNNING);
    attr.set_pinned(1);
    attr.set_exclude_host(1);
    attr.set_exclude_hv(1);
    attr
}

fn to_result(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the exclude bits of user mode, kernel, hypervisor and host, and `config1`.
    fn restricted(levels: PrivilegeLevels, filter: Filter, scope: Scope) -> ([u64; 4], u64) {
        let mut attr = attributes(FAR);
        levels.restrict(&mut attr, filter, scope);
        let excluded = [attr.exclude_user(), attr.exclude_kernel(), attr.exclude_hv(), attr.exclude_host()];
        // SAFETY: all fields of the union are integers.
        (excluded, unsafe { attr.__bindgen_anon_3.config1 })
    }

    #[test]
    fn a_filter_excludes_privilege_levels_of_the_guest_and_where_the_kernel_cannot_tell_of_the_host() {
        for (filter, [user, kernel]) in
            [(Filter::User, [0, 1]), (Filter::Kernel, [1, 0]), (Filter::All, [0, 0])]
        {
            use PrivilegeLevels::{GuestAndHost, GuestOrHost};
            assert_eq!(restricted(GuestAndHost, filter, Scope::Guest), ([user, kernel, 1, 1], 0));
            assert_eq!(restricted(GuestAndHost, filter, Scope::Thread), ([user, kernel, 1, 0], 0));
            assert_eq!(restricted(GuestOrHost, filter, Scope::Guest), ([user, kernel, 1, 1], 1));
            // The host's kernel is excluded only from counts of user mode.
            let host_kernel = u64::from(filter == Filter::User);
            assert_eq!(restricted(GuestOrHost, filter, Scope::Thread), ([user, kernel, host_kernel, 0], 1));
        }
    }
}
