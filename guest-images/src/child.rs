//! Settings of child processes that the standard library does not support.

use std::io::{Error, ErrorKind};
use std::os::fd::RawFd;
use std::os::unix::process::{CommandExt, parent_id};
use std::process::Command;

/// Lets the child inherit these file descriptors, with the same numbers.
pub fn inherit(command: &mut Command, descriptors: Vec<RawFd>) {
    let prepare = move || {
        for &descriptor in &descriptors {
            // SAFETY: Changing the flags of a descriptor does not access memory.
            if unsafe { libc::fcntl(descriptor, libc::F_SETFD, 0) } < 0 {
                return Err(Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: between fork and exec, `prepare` makes system calls and neither allocates nor locks.
    unsafe { command.pre_exec(prepare) };
}

/// The way in which a child is ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Death {
    /// By SIGTERM, so that it can end its own children.
    Terminate,
    /// By SIGKILL.
    Kill,
}

/// Ends the child when the thread that starts it ends, for whatever reason.
pub fn die_with_this_process(command: &mut Command, death: Death) {
    let parent = std::process::id();
    let signal = match death {
        Death::Terminate => libc::SIGTERM,
        Death::Kill => libc::SIGKILL,
    };
    let prepare = move || {
        // SAFETY: this option takes a signal number and does not access memory.
        if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, signal) } < 0 {
            return Err(Error::last_os_error());
        }
        // The parent may have died before that call.
        if parent_id() == parent { Ok(()) } else { Err(ErrorKind::Interrupted.into()) }
    };
    // SAFETY: between fork and exec, `prepare` makes system calls and neither allocates nor locks.
    unsafe { command.pre_exec(prepare) };
}
