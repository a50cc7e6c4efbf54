//! What the standard library cannot say about a child process.

use std::io::{Error, ErrorKind};
use std::os::fd::RawFd;
use std::os::unix::process::{CommandExt, parent_id};
use std::process::Command;

/// The child gets these descriptors, under their own numbers.
pub fn inherit(command: &mut Command, descriptors: Vec<RawFd>) {
    let prepare = move || {
        for &descriptor in &descriptors {
            // SAFETY: changing the flags of a descriptor touches no memory.
            if unsafe { libc::fcntl(descriptor, libc::F_SETFD, 0) } < 0 {
                return Err(Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: between fork and exec, `prepare` makes system calls and neither allocates nor locks.
    unsafe { command.pre_exec(prepare) };
}

/// How a child is to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Death {
    /// It is asked to, and can end its own children.
    Asked,
    /// At once.
    Sudden,
}

/// The child ends when the thread that starts it does, however that happens.
pub fn die_with_this_process(command: &mut Command, death: Death) {
    let parent = std::process::id();
    let signal = match death {
        Death::Asked => libc::SIGTERM,
        Death::Sudden => libc::SIGKILL,
    };
    let prepare = move || {
        // SAFETY: this option takes a signal number and touches no memory.
        if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, signal) } < 0 {
            return Err(Error::last_os_error());
        }
        // The parent may have died before that call.
        if parent_id() == parent { Ok(()) } else { Err(ErrorKind::Interrupted.into()) }
    };
    // SAFETY: between fork and exec, `prepare` makes system calls and neither allocates nor locks.
    unsafe { command.pre_exec(prepare) };
}
