//! What the standard library lacks for child processes.

use std::fs;
use std::io::{Error, ErrorKind, Result};
use std::os::fd::RawFd;
use std::os::unix::process::{CommandExt, parent_id};
use std::process::{Child, Command};
use std::time::Duration;

use rustix::param::clock_ticks_per_second;

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

/// Returns the time for which a child has run on processors. It must not have been waited for.
pub fn processor_time(child: &Child) -> Result<Duration> {
    let statistics = fs::read_to_string(format!("/proc/{}/stat", child.id()))?;
    time_in(&statistics).ok_or_else(|| ErrorKind::InvalidData.into())
}

/// Returns the time for which a process has run on processors, from its `/proc/PID/stat`.
fn time_in(statistics: &str) -> Option<Duration> {
    // The name of the program, in parentheses, may contain anything.
    let (_, fields) = statistics.rsplit_once(')')?;
    let mut ticks = fields.split_whitespace().skip(11).map_while(|field| field.parse::<u64>().ok());
    let ticks = ticks.next()?.checked_add(ticks.next()?)?;
    Some(Duration::from_secs(ticks) / u32::try_from(clock_ticks_per_second()).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_run_in_user_and_in_kernel_mode() {
        let ticks = clock_ticks_per_second();
        let text = format!("42 (a ) b) S 1 42 42 0 -1 4194560 99 0 0 0 {} {ticks} 7 7 20 0 1 0 5", 2 * ticks);
        assert_eq!(time_in(&text), Some(Duration::from_secs(3)));
        assert_eq!(time_in("42 (gone"), None);
    }
}
