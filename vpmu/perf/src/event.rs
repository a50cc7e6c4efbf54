//! One perf event of a guest: opening it, reading it, setting its period.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use perf_event_open_sys as sys;

use crate::entries::Added;
use crate::estimate::Estimate;
use crate::host::HostPmu;
use crate::page::{Page, ScheduledOut};
use crate::request::{Encoded, Precedence, Purpose, Request, this_thread};
use crate::system_calls::SystemCalls;
use vpmu::event::{Event, Selection};
use vpmu::report::BackingReport;
use vpmu::source::{Count, FAR, Place};

/// A pinned perf event that counts the thread that opened it. It must be used and dropped on that thread.
pub struct PerfEvent {
    fd: OwnedFd,
    /// The event's page, or why it could not be mapped.
    page: io::Result<Page>,
    /// The period that was set last.
    period: u64,
    /// The count, with the entries into the guest, at which it overflows next.
    expires_at: u64,
    /// What it had counted when it was enabled last.
    base: u64,
    /// For how long it had been enabled until then, in nanoseconds.
    enabled_before: u64,
    /// What it had counted at the last read.
    last_count: u64,
    /// Time for which the event was enabled but not on the PMU, at the last read by system call, in nanoseconds.
    unscheduled: u64,
    /// Attempts to get the event out of its error state.
    attempts: Attempts,
    /// The event was in error state at the last read.
    was_in_error: bool,
    /// Estimate of the counts that were missed without hardware, if it was asked for.
    estimate: Option<Estimate>,
    /// What entries into the guest add to the count, if they do.
    entries: Option<Added>,
    system_calls: SystemCalls,
}

/// What `read` returns with the `read_format` of this crate's events.
#[repr(C)]
#[derive(Default)]
struct Reading {
    value: u64,
    enabled: u64,
    running: u64,
}

impl PerfEvent {
    /// Opens an event of this thread's guest, which counts at once and signals this thread every `period` counts.
    pub fn open(pmu: HostPmu, selection: Selection, period: u64, calls: SystemCalls) -> io::Result<Self> {
        let Selection { event, filter, scope } = selection;
        Self::of_this_thread(pmu.encode(event)?, Purpose::Counter { filter, scope, period }, calls)
    }

    /// Opens a disabled event of the guest that raises no signal, to find out whether a counter is free for it.
    pub fn open_probe(pmu: HostPmu, event: Event, precedence: Precedence) -> io::Result<Self> {
        Self::of_this_thread(pmu.encode(event)?, Purpose::Probe(precedence), SystemCalls::default())
    }

    /// Opens a disabled event, which takes no counter, to find out whether the host has the event.
    pub fn open_disabled(pmu: HostPmu, event: Event, calls: SystemCalls) -> io::Result<Self> {
        Self::of_this_thread(pmu.encode(event)?, Purpose::Existence, calls)
    }

    /// Does the same as [`Self::open_disabled`] for one of the kernel's generic events, by its number (`enum
    /// perf_hw_id`).
    pub fn open_generic_disabled(pmu: HostPmu, number: u64) -> io::Result<Self> {
        Self::of_this_thread(pmu.generic(number), Purpose::Existence, SystemCalls::default())
    }

    fn of_this_thread(event: Encoded, purpose: Purpose, system_calls: SystemCalls) -> io::Result<Self> {
        let request = Request { event, thread: this_thread(), purpose };
        let fd = request.open()?;
        // An event without a page can still be read by a system call.
        let page = Page::map(&fd);
        system_calls.add(request.system_calls() + 1);
        let period = if let Purpose::Counter { period, .. } = purpose { period } else { 0 };
        Ok(Self {
            fd,
            page,
            period,
            expires_at: period,
            base: 0,
            enabled_before: 0,
            last_count: 0,
            unscheduled: 0,
            attempts: Attempts::default(),
            was_in_error: false,
            estimate: None,
            entries: None,
            system_calls,
        })
    }

    /// Returns why the event's page is not mapped, if it is not.
    pub fn unmapped(&self) -> Option<&io::Error> {
        self.page.as_ref().err()
    }

    /// Maps the event's page if it is not mapped.
    pub fn map(&mut self) {
        if self.page.is_err() {
            self.page = Page::map(&self.fd);
            self.system_calls.add(1);
        }
    }

    /// Leaves out of the count what entries into the guest add to it.
    pub fn leave_out(&mut self, entries: Option<Added>) {
        self.entries = entries;
    }

    /// Adds to the count, from now on, an estimate of what the event misses without hardware.
    pub fn estimate(&mut self) {
        self.estimate = Some(Estimate::new(self.enabled_before));
    }

    /// Stops counting: the event takes no counter until it is enabled.
    pub fn disable(&self) -> io::Result<()> {
        // SAFETY: `PERF_EVENT_IOC_DISABLE` takes no pointer.
        let result = unsafe { sys::ioctls::DISABLE(self.fd.as_raw_fd(), 0) };
        self.system_calls.add(1);
        to_result(result)
    }

    /// Starts to count from zero again, as an event that was just opened does.
    pub fn restart(&mut self, period: u64) -> io::Result<()> {
        let state = self.scheduled_out().ok_or(io::ErrorKind::InvalidInput)?;
        // The rest of a period that is that long never ends.
        if (period, self.period) != (FAR, FAR) {
            self.set_period(period)?;
        }
        (self.base, self.last_count, self.enabled_before) = (state.count, state.count, state.enabled);
        (self.attempts, self.was_in_error, self.estimate) = (Attempts::default(), false, None);
        self.expires_at = state.count.saturating_add(self.period);
        if let Some(entries) = &mut self.entries {
            entries.begin();
        }
        self.unscheduled = state.enabled.saturating_sub(state.running);
        self.enable();
        Ok(())
    }

    /// Returns what was counted so far, plus the estimate of what was missed, if there is one.
    pub fn read(&mut self) -> Count {
        let count = self.read_exactly();
        let count = if self.estimate.is_some() { self.with_estimate(count) } else { count };
        let count = count.map(|number| number.saturating_sub(self.base));
        match &mut self.entries {
            Some(entries) => entries.take_off(count),
            None => count,
        }
    }

    fn read_exactly(&mut self) -> Count {
        let was_in_error = std::mem::take(&mut self.was_in_error);
        if let Some(count) = self.read_directly() {
            if was_in_error {
                self.attempts = Attempts::default();
            }
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
        if was_in_error {
            self.attempts = Attempts::default();
        }
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
        let count = self.page.as_ref().ok()?.read()?;
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
        count.map(|count| count.saturating_add(missed))
    }

    /// Returns how much of the count is an estimate.
    pub fn estimated(&self) -> u64 {
        self.estimate.as_ref().map_or(0, Estimate::missed)
    }

    /// Returns where the event is, as far as its page says it.
    pub fn place(&self) -> Place {
        self.page.as_ref().map_or(Place::Unknown, Page::place)
    }

    /// Returns the event's hardware counter, and for how long it was enabled and counted.
    pub fn report(&self) -> BackingReport {
        let hardware = self.page.as_ref().ok().and_then(Page::hardware);
        let times = self.read_by_system_call().map(|reading| (reading.enabled, reading.running));
        let (enabled_ns, running_ns) = times
            .or_else(|| self.scheduled_out().map(|state| (state.enabled, state.running)))
            .unwrap_or((0, 0));
        BackingReport { hardware, enabled_ns, running_ns }
    }

    fn scheduled_out(&self) -> Option<ScheduledOut> {
        self.page.as_ref().ok().and_then(Page::scheduled_out)
    }

    /// Sets the period: the event overflows after `period` more counts, and then every `period` counts.
    pub fn set_period(&mut self, period: u64) -> io::Result<()> {
        // SAFETY: `PERF_EVENT_IOC_PERIOD` takes a pointer to a `u64`, which the kernel only reads.
        let result =
            unsafe { libc::ioctl(self.fd.as_raw_fd(), sys::bindings::PERIOD.into(), &raw const period) };
        self.system_calls.add(1);
        self.period = period;
        self.expires_at = self.last_count.saturating_add(period);
        to_result(result)
    }

    /// Returns whether the event has overflowed since the last call, as of the last read, if entries into the guest
    /// bring its overflows nearer.
    pub fn takes_early_expiry(&mut self) -> bool {
        if self.entries.is_none() || self.last_count < self.expires_at {
            return false;
        }
        let beyond = self.last_count - self.expires_at;
        let periods = beyond.checked_div(self.period).unwrap_or(0).saturating_add(1);
        self.expires_at = self.expires_at.saturating_add(periods.saturating_mul(self.period.max(1)));
        true
    }

    /// Returns what was counted. Returns `None` for an event that found no free counter.
    pub fn counted(&self) -> Option<u64> {
        let reading = self.read_by_system_call()?;
        (reading.running > 0 && reading.running == reading.enabled).then_some(reading.value)
    }

    /// Enables an event that was just opened again if it found no free counter. Nothing is missed yet, so nobody need
    /// know of it if there is one now.
    pub fn settle(&mut self) {
        if self.read_directly().is_none() && self.read_by_system_call().is_none() {
            self.enable();
        }
    }

    /// Enables the event again, because a pinned event that found no free counter stays in error state until then. Does
    /// nothing if that was tried a short time ago.
    fn reenable(&mut self) {
        if self.attempts.is_due(Instant::now()) {
            self.enable();
        }
    }

    /// Enables the event.
    pub fn enable(&self) {
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

/// Attempts to get an event out of its error state. Linux since 6.15 signals each failure, and a thread that tried
/// again at every signal would do nothing else. So there is a pause between two attempts, and each pause is twice as
/// long as the one before it, up to a longest.
#[derive(Default)]
struct Attempts {
    last: Option<Instant>,
    pause: Duration,
}

impl Attempts {
    const FIRST: Duration = Duration::from_micros(50);
    const LONGEST: Duration = Duration::from_millis(5);

    /// Returns whether an attempt is due, which is then made.
    fn is_due(&mut self, now: Instant) -> bool {
        if self.last.is_some_and(|last| now.duration_since(last) < self.pause) {
            return false;
        }
        self.last = Some(now);
        self.pause = (2 * self.pause).clamp(Self::FIRST, Self::LONGEST);
        true
    }
}

impl Drop for PerfEvent {
    fn drop(&mut self) {
        // The file descriptor is closed, and the page is unmapped.
        self.system_calls.add(1 + u64::from(self.page.is_ok()));
    }
}

fn to_result(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_begin_at_once_and_become_rare() {
        let begin = Instant::now();
        let mut attempts = Attempts::default();
        let made =
            (0..100_000).filter(|at| attempts.is_due(begin + Duration::from_micros(*at))).collect::<Vec<_>>();
        assert_eq!(made[..6], [0, 50, 150, 350, 750, 1550]);
        assert!(made.len() < 30, "{made:?}");
        assert!(made.windows(2).all(|two| two[1] - two[0] <= 5000), "{made:?}");
    }
}
