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

/// The child gets `signal` when the thread that starts it ends, however that happens.
pub fn die_with_this_process(command: &mut Command, signal: libc::c_int) {
    let parent = std::process::id();
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
