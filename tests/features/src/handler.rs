//! Overflows as signals. The handler records for each counter how many signals came, and the last one's thread and
//! address.

use std::mem;
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use perf_event_open_sys::bindings;

use crate::code;
use crate::event::Counter;
use crate::failure::{Failure, checked, equal};
use crate::worker::this_thread;

/// Number of file descriptors for which signals are recorded.
const DESCRIPTORS: usize = 64;

/// The `si_code` of an overflow that disabled the counter: `POLL_HUP`, which the `libc` crate does not define.
const LAST_OVERFLOW: i32 = 6;

/// The record of one counter's signals. The handler can use atomics only.
struct Record {
    times: AtomicU64,
    thread: AtomicI32,
    ip: AtomicU64,
    code: AtomicI32,
}

/// The record of each counter, by file descriptor.
static RECORDS: [Record; DESCRIPTORS] = [const {
    Record {
        times: AtomicU64::new(0),
        thread: AtomicI32::new(0),
        ip: AtomicU64::new(0),
        code: AtomicI32::new(0),
    }
}; DESCRIPTORS];

/// The values of a [`Record`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Recorded {
    times: u64,
    thread: i32,
    ip: u64,
    code: i32,
}

/// Returns the signal to use: a real-time signal, of which every one sent is queued, and which nothing else here uses.
pub fn signal() -> i32 {
    libc::SIGRTMIN() + 3
}

/// Installs the handler for `signal`.
pub fn install() -> Result<(), Failure> {
    // SAFETY: all-zero is a valid `sigaction`, a plain C structure.
    let mut action: libc::sigaction = unsafe { mem::zeroed() };
    let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = overflowed;
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
    // SAFETY: the handler uses atomics only, which are async-signal-safe.
    checked("install a signal handler", unsafe {
        libc::sigaction(signal(), &raw const action, ptr::null_mut())
    })
    .map(drop)
}

/// Returns what the handler has recorded for this counter.
fn recorded(counter: &Counter) -> Recorded {
    let record = &RECORDS[usize::try_from(counter.fd()).expect("file descriptors are not negative")];
    Recorded {
        times: record.times.load(Ordering::Relaxed),
        thread: record.thread.load(Ordering::Relaxed),
        ip: record.ip.load(Ordering::Relaxed),
        code: record.code.load(Ordering::Relaxed),
    }
}

extern "C" fn overflowed(_: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel gives a handler a valid `siginfo_t`.
    let info = unsafe { &*info };
    let context = context.cast::<libc::ucontext_t>();
    // SAFETY: the kernel gives a handler a valid `ucontext_t`.
    let ip = code::interrupted_at(unsafe { &*context });
    let Some(record) = usize::try_from(descriptor(info)).ok().and_then(|fd| RECORDS.get(fd)) else { return };
    record.times.fetch_add(1, Ordering::Relaxed);
    record.thread.store(this_thread(), Ordering::Relaxed);
    record.ip.store(ip, Ordering::Relaxed);
    record.code.store(info.si_code, Ordering::Relaxed);
}

/// Returns the file descriptor that a signal is about (`si_fd`).
pub fn descriptor(info: &libc::siginfo_t) -> i32 {
    // `si_fd` follows `si_band` (8 bytes), which follows `si_signo`, `si_errno`, `si_code` and padding (16 bytes).
    const OFFSET: usize = 24;
    // SAFETY: the field is inside the structure and aligned.
    unsafe { ptr::read(ptr::from_ref(info).cast::<i32>().wrapping_add(OFFSET / 4)) }
}

/// Requests that each overflow of the counter sends `signal` to a thread.
pub fn send_to(counter: &Counter, thread: i32) -> Result<(), Failure> {
    #[repr(C)]
    struct Owner {
        kind: i32,
        number: i32,
    }
    // From `linux/fcntl.h`; the `libc` crate does not define them.
    const F_SETSIG: i32 = 10;
    const F_SETOWN_EX: i32 = 15;
    const F_OWNER_TID: i32 = 0;
    let owner = Owner { kind: F_OWNER_TID, number: thread };
    // SAFETY: the owner is valid for the whole call.
    checked("choose a thread for signals", unsafe {
        libc::fcntl(counter.fd(), F_SETOWN_EX, &raw const owner)
    })?;
    // SAFETY: the argument is a number.
    checked("choose a signal", unsafe { libc::fcntl(counter.fd(), F_SETSIG, signal()) })?;
    // SAFETY: the argument is a number.
    checked("request signals", unsafe { libc::fcntl(counter.fd(), libc::F_SETFL, libc::O_ASYNC) }).map(drop)
}

/// Runs the loop, in the middle of which the counter overflows and is disabled, for the `times`-th time. Checks that
/// the handler was called on this thread at the instruction of the overflow, and that nothing was counted after it.
pub fn overflow(counter: &Counter, period: u64, times: u64) -> Result<(), Failure> {
    let last_one = counter.call(bindings::REFRESH, 1);
    let place = code::run(last_one, period, counter.call(bindings::DISABLE, 0))?;
    let expected = Recorded { times, thread: this_thread(), ip: place.jump, code: LAST_OVERFLOW };
    equal("what the handler has recorded", recorded(counter), expected)?;
    equal("the count", counter.value()?, times * period)
}
