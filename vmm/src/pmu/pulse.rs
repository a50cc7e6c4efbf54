//! What has to be done once in a while, though the guest gives no occasion for it: counters that have lost their hardware are
//! found out, and hardware that no counter uses is given back. A timer sends the signal of alarms to the vCPU's own
//! thread, but only while that holds counters of the host.

use std::io;
use std::mem::zeroed;
use std::ptr;
use std::time::{Duration, Instant};

const INTERVAL: Duration = Duration::from_secs(1);

/// A thread's pulse.
pub struct Pulse {
    timer: libc::timer_t,
    /// When the last beat was, while it beats.
    last: Option<Instant>,
}

impl Pulse {
    /// A pulse of this thread, at rest, whose beats are this signal.
    pub fn new(signal: libc::c_int) -> io::Result<Self> {
        // SAFETY: all-zero is a valid `sigevent`, a plain C structure.
        let mut event: libc::sigevent = unsafe { zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = signal;
        // SAFETY: takes nothing.
        event.sigev_notify_thread_id = unsafe { libc::gettid() };
        let mut timer = ptr::null_mut();
        // SAFETY: both are valid for the call.
        if unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { timer, last: None })
    }

    /// Has it beat, or rest.
    pub fn beat(&mut self, beats: bool) {
        if beats == self.last.is_some() {
            return;
        }
        self.last = beats.then(Instant::now);
        let seconds = if beats { INTERVAL.as_secs().cast_signed() } else { 0 };
        let interval = libc::timespec { tv_sec: seconds, tv_nsec: 0 };
        let times = libc::itimerspec { it_interval: interval, it_value: interval };
        // SAFETY: the timer exists, and `times` is valid; the old times are not asked for.
        unsafe { libc::timer_settime(self.timer, 0, &raw const times, ptr::null_mut()) };
    }

    /// After a signal: whether it was a beat, or one was due.
    pub fn take(&mut self) -> bool {
        let Some(last) = &mut self.last else { return false };
        // In step with the timer, however late this thread is.
        let beats = last.elapsed().as_secs() / INTERVAL.as_secs();
        *last += INTERVAL * u32::try_from(beats).unwrap_or(u32::MAX);
        beats > 0
    }
}

impl Drop for Pulse {
    fn drop(&mut self) {
        // SAFETY: the timer exists, and nobody uses it any more.
        unsafe { libc::timer_delete(self.timer) };
    }
}
