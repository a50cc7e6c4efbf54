//! Ends the TCP connections of a guest that was saved and has been restored: their other ends know nothing of this
//! guest.

use std::fs;
use std::io::Result;
use std::os::fd::RawFd;

use libc::pid_t;

use crate::sys;

/// Resets all connections to other machines. What fails stays as it was.
pub fn reset_all() {
    let numbers = |folder: String| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect::<Vec<i32>>()
    };
    for process in numbers("/proc".into()).into_iter().filter(|process| *process != 1) {
        let sockets = numbers(format!("/proc/{process}/fd"));
        let sockets = sockets.into_iter().filter(|fd| is_socket(process, *fd)).collect::<Vec<_>>();
        if !sockets.is_empty() {
            // It may have ended.
            let _ = reset(process, &sockets);
        }
    }
}

fn is_socket(process: pid_t, fd: RawFd) -> bool {
    let link = fs::read_link(format!("/proc/{process}/fd/{fd}"));
    link.is_ok_and(|to| to.to_str().is_some_and(|to| to.starts_with("socket:")))
}

fn reset(process: pid_t, sockets: &[RawFd]) -> Result<()> {
    let process = sys::pidfd_open(process)?;
    for socket in sockets {
        let _ = sys::pidfd_getfd(&process, *socket).and_then(|socket| sys::reset_connection(&socket));
    }
    Ok(())
}
