//! Lets this process end before KVM has torn down its machine.
//!
//! Whoever closes a machine's last file descriptor waits until its kernel threads have ended and several of RCU's grace periods
//! have passed: some 50 ms, without any work, at the end of each run. So a child process keeps the machine's file descriptor, and
//! nothing else, until this process has ended, and waits instead of it.

use std::io;
use std::os::fd::{AsRawFd, RawFd};

use kvm_ioctls::VmFd;

/// Starts the child. An error means that this process waits for KVM itself.
pub fn in_background(vm: &VmFd) -> io::Result<()> {
    let (vm, parent) = (vm.as_raw_fd(), std::process::id().cast_signed());
    // SAFETY: the child makes nothing but system calls, so that it needs no lock that another thread may hold.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => keep(vm, parent),
        _ => Ok(()),
    }
}

/// Waits for the parent's end. No signal ends the wait: those of a terminal are for the parent.
fn keep(vm: RawFd, parent: libc::pid_t) -> ! {
    block_signals();
    // SAFETY: the name ends with a NUL.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"tally-teardown".as_ptr()) };
    // SAFETY: takes numbers.
    let parent = unsafe { libc::syscall(libc::SYS_pidfd_open, parent, 0) };
    if let Ok(parent) = RawFd::try_from(parent)
        && parent >= 0
    {
        let [first, second] = if vm < parent { [vm, parent] } else { [parent, vm] };
        close_between(-1, first);
        close_between(first, second);
        close_between(second, RawFd::MAX);
        let mut ended = libc::pollfd { fd: parent, events: libc::POLLIN, revents: 0 };
        // SAFETY: the array of one entry is valid. A parent that has ended already is noticed, too.
        unsafe { libc::poll(&raw mut ended, 1, -1) };
    }
    // SAFETY: takes a number, and runs nothing else.
    unsafe { libc::_exit(0) }
}

fn block_signals() {
    // SAFETY: all-zero is a valid set.
    let mut all: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set is valid for both calls.
    unsafe { libc::sigfillset(&raw mut all) };
    // SAFETY: as above.
    unsafe { libc::sigprocmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut()) };
}

/// Closes all file descriptors between two.
fn close_between(first: RawFd, second: RawFd) {
    if first + 1 < second {
        // SAFETY: takes numbers. If the kernel has no such call, more is kept open than necessary.
        unsafe { libc::syscall(libc::SYS_close_range, first + 1, second - 1, 0) };
    }
}
