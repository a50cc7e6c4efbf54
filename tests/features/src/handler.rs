//! Overflows as signals: a handler that writes down which counter's it was, on which thread and where.

use std::mem;
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use perf_event_open_sys::bindings;

use crate::code;
use crate::event::Counter;
use crate::failure::{Failure, checked, equal};
use crate::worker::this_thread;

/// How far descriptors are told apart.
const DESCRIPTORS: usize = 64;

/// The `si_code` of an overflow after which the counter is off: `POLL_HUP`, which the C library's binding does not have.
const LAST_OVERFLOW: i32 = 6;

struct Last {
    times: AtomicU64,
    thread: AtomicI32,
    ip: AtomicU64,
    code: AtomicI32,
}

static LAST: [Last; DESCRIPTORS] = [const {
    Last {
        times: AtomicU64::new(0),
        thread: AtomicI32::new(0),
        ip: AtomicU64::new(0),
        code: AtomicI32::new(0),
    }
}; DESCRIPTORS];

/// What the handler has seen of a counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Seen {
    times: u64,
    thread: i32,
    ip: u64,
    code: i32,
}

/// A signal that is queued as often as it is sent, and not used by anybody else.
pub fn signal() -> i32 {
    libc::SIGRTMIN() + 3
}

/// Has the handler called for every `signal`.
pub fn install() -> Result<(), Failure> {
    // SAFETY: all-zero is a valid `sigaction`, a plain C structure.
    let mut action: libc::sigaction = unsafe { mem::zeroed() };
    let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = overflowed;
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
    // SAFETY: the handler uses atomics alone, which is allowed at any time.
    checked("install a signal handler", unsafe {
        libc::sigaction(signal(), &raw const action, ptr::null_mut())
    })
    .map(drop)
}

/// What the handler has seen of this counter.
fn seen(counter: &Counter) -> Seen {
    let last = &LAST[usize::try_from(counter.fd()).expect("descriptors are not negative")];
    Seen {
        times: last.times.load(Ordering::Relaxed),
        thread: last.thread.load(Ordering::Relaxed),
        ip: last.ip.load(Ordering::Relaxed),
        code: last.code.load(Ordering::Relaxed),
    }
}

extern "C" fn overflowed(_: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel gives a handler a valid `siginfo_t`.
    let info = unsafe { &*info };
    let context = context.cast::<libc::ucontext_t>();
    // SAFETY: the kernel gives a handler a valid `ucontext_t`.
    let ip = code::interrupted_at(unsafe { &*context });
    let Some(last) = usize::try_from(descriptor(info)).ok().and_then(|fd| LAST.get(fd)) else { return };
    last.times.fetch_add(1, Ordering::Relaxed);
    last.thread.store(this_thread(), Ordering::Relaxed);
    last.ip.store(ip, Ordering::Relaxed);
    last.code.store(info.si_code, Ordering::Relaxed);
}

/// The descriptor that a signal names.
pub fn descriptor(info: &libc::siginfo_t) -> i32 {
    // `si_fd` is behind `si_band`, which is behind the three numbers that all signals have and a gap.
    const OFFSET: usize = 24;
    // SAFETY: the structure is larger than this, and aligned for it.
    unsafe { ptr::read(ptr::from_ref(info).cast::<i32>().wrapping_add(OFFSET / 4)) }
}

/// Has the counter's overflows sent to a thread as `signal`.
pub fn send_to(counter: &Counter, thread: i32) -> Result<(), Failure> {
    #[repr(C)]
    struct Owner {
        kind: i32,
        number: i32,
    }
    // From `linux/fcntl.h`; the C library's header has them, its binding has not.
    const F_SETSIG: i32 = 10;
    const F_SETOWN_EX: i32 = 15;
    const F_OWNER_TID: i32 = 0;
    let owner = Owner { kind: F_OWNER_TID, number: thread };
    // SAFETY: the owner is valid for as long as the call reads it.
    checked("choose a thread for signals", unsafe {
        libc::fcntl(counter.fd(), F_SETOWN_EX, &raw const owner)
    })?;
    // SAFETY: takes a number.
    checked("choose a signal", unsafe { libc::fcntl(counter.fd(), F_SETSIG, signal()) })?;
    // SAFETY: takes a number.
    checked("ask for signals", unsafe { libc::fcntl(counter.fd(), libc::F_SETFL, libc::O_ASYNC) }).map(drop)
}

/// Goes round the loop, in the middle of which the counter overflows and is switched off, for the n-th time; demands that
/// the handler was called there and then, and that nothing was counted after it.
pub fn overflow(counter: &Counter, period: u64, times: u64) -> Result<(), Failure> {
    let last_one = counter.call(bindings::REFRESH, 1);
    let place = code::run(last_one, period, counter.call(bindings::DISABLE, 0))?;
    let expected = Seen { times, thread: this_thread(), ip: place.jump, code: LAST_OVERFLOW };
    equal("what the handler has seen", seen(counter), expected)?;
    equal("the count", counter.value()?, times * period)
}
