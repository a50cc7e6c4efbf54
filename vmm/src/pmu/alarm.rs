//! How a vCPU's thread leaves the guest when one of its counters has overflowed: the perf event sends a signal to this very
//! thread, and the handler asks `KVM_RUN` to return at once. No other thread and no lock is involved, and no alarm can
//! come between the last look and the entry into the guest.

use std::cell::Cell;
use std::io;
use std::ptr;
use std::sync::atomic::{Ordering, compiler_fence};

use kvm_ioctls::VcpuFd;

use crate::signals::unblock;

thread_local! {
    /// `immediate_exit` of the vCPU that this thread runs.
    static IMMEDIATE_EXIT: Cell<*mut u8> = const { Cell::new(ptr::null_mut()) };
    /// What has sent signals since that was last asked.
    static CALLED: Cell<Called> = const { Cell::new(Called::NOT) };
}

/// The signal that perf events send.
pub fn signal() -> libc::c_int {
    libc::SIGRTMIN()
}

/// Handles the signal from now on, and the one that comes in its place when the queue of signals is full.
pub fn install() -> io::Result<()> {
    // SAFETY: all-zero is a valid `sigaction`: no flags, an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(libc::c_int, *const libc::siginfo_t, *const libc::c_void) = on_alarm;
    action.sa_sigaction = handler as libc::sighandler_t;
    action.sa_flags = libc::SA_RESTART | libc::SA_SIGINFO;
    let signals = [signal(), libc::SIGIO];
    for number in signals {
        // SAFETY: the handler only touches thread-local memory that needs no set-up, and the vCPU's shared page.
        if unsafe { libc::sigaction(number, &raw const action, ptr::null_mut()) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    // Whoever started this program may have left them blocked.
    unblock(&signals)
}

extern "C" fn on_alarm(_signal: libc::c_int, info: *const libc::siginfo_t, _context: *const libc::c_void) {
    // Those of perf events come from the kernel itself; timers' and other threads' have negative codes.
    // SAFETY: the kernel gives it to handlers that want it, as this does.
    let by_alarm = unsafe { (*info).si_code } > 0;
    let before = CALLED.get();
    CALLED.set(Called { by_alarm: before.by_alarm || by_alarm, otherwise: before.otherwise || !by_alarm });
    let flag = IMMEDIATE_EXIT.get();
    if !flag.is_null() {
        // SAFETY: it points into the vCPU's shared page, which is mapped as long as the `ExitFlag` lives.
        unsafe { flag.write_volatile(1) };
    }
}

/// Why a thread has left the guest, as far as signals go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Called {
    /// A perf event has counted as far as it was to.
    pub by_alarm: bool,
    /// A timer has, or another thread, or somebody wants to be asked.
    pub otherwise: bool,
}

impl Called {
    /// Not because of a signal.
    pub const NOT: Self = Self { by_alarm: false, otherwise: false };
}

/// The flag that has this thread's vCPU leave the guest. While it lives, signals set it.
pub struct ExitFlag(*mut u8);

impl ExitFlag {
    /// That of the vCPU that this thread is going to run, one at a time.
    ///
    /// # Safety
    /// `fd` has to outlive it.
    pub unsafe fn of(fd: &mut VcpuFd) -> Self {
        let flag = &raw mut fd.get_kvm_run().immediate_exit;
        IMMEDIATE_EXIT.set(flag);
        Self(flag)
    }

    /// What signals have come since this was last asked. What they are about must be looked at after that.
    pub fn take(&mut self) -> Called {
        // SAFETY: as in the handler, which is the only other one to write, on this thread.
        let came = unsafe { self.0.read_volatile() } != 0;
        if came {
            // SAFETY: as above.
            unsafe { self.0.write_volatile(0) };
        }
        compiler_fence(Ordering::SeqCst);
        match came {
            false => Called::NOT,
            // The flag was set otherwise, or by a signal that came while it was asked for the last time.
            true if CALLED.get() == Called::NOT => Called { otherwise: true, ..Called::NOT },
            true => CALLED.replace(Called::NOT),
        }
    }
}

impl Drop for ExitFlag {
    fn drop(&mut self) {
        IMMEDIATE_EXIT.set(ptr::null_mut());
    }
}
