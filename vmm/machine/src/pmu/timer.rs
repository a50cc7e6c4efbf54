//! A timer that sends a signal to the thread that created it.

use std::io;
use std::mem::zeroed;
use std::ptr;
use std::time::Duration;

/// A POSIX timer (`timer_create(2)`) with `SIGEV_THREAD_ID`.
pub struct Timer(libc::timer_t);

impl Timer {
    /// Creates a disarmed timer that signals this thread.
    pub fn new(signal: libc::c_int) -> io::Result<Self> {
        // SAFETY: all-zero is a valid `sigevent`, a plain C structure.
        let mut event: libc::sigevent = unsafe { zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = signal;
        event.sigev_notify_thread_id = rustix::thread::gettid().as_raw_pid();
        let mut timer = ptr::null_mut();
        // SAFETY: both pointers are valid for the call.
        if unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self(timer))
    }

    /// Sends the signal once, after this time. Replaces an earlier setting.
    pub fn arm(&mut self, after: Duration) {
        // A time of 0 would disarm the timer.
        self.set(after.max(Duration::from_nanos(1)));
    }

    pub fn disarm(&mut self) {
        self.set(Duration::ZERO);
    }

    fn set(&mut self, after: Duration) {
        let times = libc::itimerspec { it_interval: timespec(Duration::ZERO), it_value: timespec(after) };
        // SAFETY: the timer exists, and `times` is valid. A null pointer means that the old setting is not returned.
        unsafe { libc::timer_settime(self.0, 0, &raw const times, ptr::null_mut()) };
    }
}

fn timespec(time: Duration) -> libc::timespec {
    libc::timespec { tv_sec: time.as_secs().cast_signed(), tv_nsec: i64::from(time.subsec_nanos()) }
}

impl Drop for Timer {
    fn drop(&mut self) {
        // SAFETY: the timer exists, and is not used after this.
        unsafe { libc::timer_delete(self.0) };
    }
}
