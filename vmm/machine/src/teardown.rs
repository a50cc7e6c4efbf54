//! Lets this process end before KVM has torn down its machine.
//!
//! Whoever closes a machine's last file descriptor waits until its kernel threads have ended and several of RCU's grace
//! periods have passed: some 50 ms, without any work, at the end of each run. So a child process keeps the machine's
//! file descriptor, and nothing else, until this process has ended, and waits instead of it. It is started early, while
//! this process is small.

use std::io::{self, PipeWriter, Write};
use std::os::fd::{AsRawFd, RawFd};

use kvm_ioctls::VmFd;

/// The child, which ends when this is dropped while the process goes on.
#[derive(Debug)]
pub struct Keeper {
    /// A byte in it ends the child. The end of this process closes it, which does not.
    end: PipeWriter,
}

impl Keeper {
    /// Starts the child. An error means that this process waits for KVM itself.
    pub fn start(vm: &VmFd) -> io::Result<Self> {
        let (given_up, end) = io::pipe()?;
        let (vm, given_up, parent) = (vm.as_raw_fd(), given_up, std::process::id().cast_signed());
        // SAFETY: the child makes nothing but system calls, so that it needs no lock that another thread may hold.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            0 => keep(vm, given_up.as_raw_fd(), parent),
            _ => Ok(Self { end }),
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // An error means that the child has ended.
        let _ = self.end.write_all(&[0]);
    }
}

/// Waits until the parent has ended, or gives up. No signal ends the wait: those of a terminal are for the parent.
fn keep(vm: RawFd, given_up: RawFd, parent: libc::pid_t) -> ! {
    block_signals();
    // SAFETY: the name ends with a NUL.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"tally-teardown".as_ptr()) };
    // SAFETY: takes numbers.
    let parent = unsafe { libc::syscall(libc::SYS_pidfd_open, parent, 0) };
    if let Ok(parent) = RawFd::try_from(parent)
        && parent >= 0
    {
        let mut kept = [vm, given_up, parent];
        kept.sort_unstable();
        let mut last = -1;
        for fd in kept {
            close_between(last, fd);
            last = fd;
        }
        close_between(last, RawFd::MAX);
        let events = libc::POLLIN;
        let mut ends = [
            libc::pollfd { fd: parent, events, revents: 0 },
            libc::pollfd { fd: given_up, events, revents: 0 },
        ];
        while ends.iter().all(|end| end.revents & events == 0) {
            // SAFETY: the array has two entries. A parent that has ended already is noticed, too.
            if unsafe { libc::poll(ends.as_mut_ptr(), 2, -1) } < 0 {
                break;
            }
            if ends[1].revents & events == 0 && ends[1].revents != 0 {
                // The parent is about to end: its other end is closed.
                ends[1].fd = -1;
            }
        }
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
