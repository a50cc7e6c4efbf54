//! Blocks signals in threads, and takes pending signals from a thread's queue.

use std::io;
use std::ptr;

use vmm_sys_util::signal::create_sigset;

/// Returns the set of these signals.
pub fn set_of(signals: &[libc::c_int]) -> libc::sigset_t {
    create_sigset(signals).expect("Linux has these signals")
}

/// Blocks signals in this thread, and in all threads that it starts from now on. Returns the set of the other signals
/// that were blocked before, as a mask with signal 1 in bit 0.
pub fn block(set: &libc::sigset_t) -> io::Result<u64> {
    let before = mask(libc::SIG_BLOCK, set)?;
    // SAFETY: the sets and the signal numbers are valid.
    let is_in = |set, signal| unsafe { libc::sigismember(set, signal) == 1 };
    let others = (1..=64).filter(|signal| is_in(&raw const before, *signal) && !is_in(set, *signal));
    Ok(others.fold(0, |bits, signal| bits | 1 << (signal - 1)))
}

/// Unblocks signals in this thread, and in all threads that it starts from now on.
pub fn unblock(set: &libc::sigset_t) -> io::Result<()> {
    mask(libc::SIG_UNBLOCK, set).map(drop)
}

/// Does something while signals are blocked in this thread. Those that were blocked before stay so.
pub fn while_blocked<T>(set: &libc::sigset_t, action: impl FnOnce() -> T) -> io::Result<T> {
    let before = mask(libc::SIG_BLOCK, set)?;
    let result = action();
    mask(libc::SIG_SETMASK, &before)?;
    Ok(result)
}

/// Takes one of these signals from this thread's queue. Returns `None` if none is pending.
pub fn take(set: &libc::sigset_t) -> Option<libc::c_int> {
    let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: all pointers are valid for the call. A null pointer means that no `siginfo_t` is returned.
    let signal = unsafe { libc::sigtimedwait(set, ptr::null_mut(), &raw const at_once) };
    (signal > 0).then_some(signal)
}

/// Changes this thread's signal mask. Returns the old mask.
fn mask(how: libc::c_int, set: &libc::sigset_t) -> io::Result<libc::sigset_t> {
    let mut before = set_of(&[]);
    // SAFETY: both sets are valid.
    let error = unsafe { libc::pthread_sigmask(how, set, &raw mut before) };
    if error == 0 { Ok(before) } else { Err(io::Error::from_raw_os_error(error)) }
}
