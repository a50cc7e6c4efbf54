//! The system calls that the standard library has no functions for.

use std::ffi::CStr;
use std::fs::File;
use std::io::{Error, Result};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use guest_agent::protocol::Size;
use libc::{c_int, pid_t, pollfd};

/// Waits until one of these can go on.
pub fn poll(waiting: &mut [pollfd]) -> Result<()> {
    let count = waiting.len() as libc::nfds_t;
    loop {
        // SAFETY: the pointer and the count are those of the slice, which is borrowed for the call.
        match check(unsafe { libc::poll(waiting.as_mut_ptr(), count, -1) }) {
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
            outcome => return outcome.map(drop),
        }
    }
}

/// Reads and writes say that they would wait, instead of waiting.
pub fn do_not_wait(file: &impl AsRawFd) -> Result<()> {
    // SAFETY: reading the flags of a descriptor touches no memory.
    let flags = check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) })?;
    // SAFETY: nor does changing them.
    check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) }).map(drop)
}

/// Sets the size of a terminal; who is in its foreground is told.
pub fn set_size(terminal: &File, size: Size) -> Result<()> {
    let size = libc::winsize { ws_row: size.rows, ws_col: size.columns, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: this request reads a `winsize`.
    check(unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) }).map(drop)
}

/// The terminal that the program on this side of it sees.
pub fn other_side(master: &File) -> Result<File> {
    let unlocked: c_int = 0;
    // SAFETY: this request reads an `int`.
    check(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSPTLCK, &raw const unlocked) })?;
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    // SAFETY: this request takes flags and gives a descriptor.
    let slave = check(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags) })?;
    // SAFETY: the descriptor is new, so nobody else owns it.
    Ok(unsafe { File::from_raw_fd(slave) })
}

/// Makes this process the leader of a new session.
pub fn new_session() -> Result<()> {
    // SAFETY: it takes nothing.
    check(unsafe { libc::setsid() }).map(drop)
}

/// Makes a terminal that of this process's session.
pub fn control_terminal(terminal: RawFd) -> Result<()> {
    // SAFETY: this request takes a number.
    check(unsafe { libc::ioctl(terminal, libc::TIOCSCTTY, 0) }).map(drop)
}

/// Undoes what this process has changed about signals. Allocates nothing.
pub fn default_signals() -> Result<()> {
    for signal in 1..=libc::SIGRTMAX() {
        // SAFETY: the default action is no function of ours. Those signals that have no other are refused, which is fine.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    mask(libc::SIG_SETMASK, &[])
}

/// A descriptor that has something to read when a child of this process has ended.
pub fn watch_children() -> Result<File> {
    mask(libc::SIG_BLOCK, &[libc::SIGCHLD])?;
    let signals = signal_set(&[libc::SIGCHLD])?;
    let flags = libc::SFD_CLOEXEC | libc::SFD_NONBLOCK;
    // SAFETY: the set is initialised, and only read.
    let descriptor = check(unsafe { libc::signalfd(-1, &raw const signals, flags) })?;
    // SAFETY: the descriptor is new, so nobody else owns it.
    Ok(unsafe { File::from_raw_fd(descriptor) })
}

fn mask(how: c_int, signals: &[c_int]) -> Result<()> {
    let signals = signal_set(signals)?;
    // SAFETY: the set is initialised, and the old one is not asked for.
    check(unsafe { libc::sigprocmask(how, &raw const signals, ptr::null_mut()) }).map(drop)
}

fn signal_set(signals: &[c_int]) -> Result<libc::sigset_t> {
    // SAFETY: a set is an array of integers, for which zero is a value.
    let mut set = unsafe { std::mem::zeroed() };
    // SAFETY: the set is ours.
    check(unsafe { libc::sigemptyset(&raw mut set) })?;
    for &signal in signals {
        // SAFETY: the set is ours and initialised.
        check(unsafe { libc::sigaddset(&raw mut set, signal) })?;
    }
    Ok(set)
}

/// A child that has ended and that nobody has asked for its status, which it keeps.
pub fn ended_child() -> Result<Option<pid_t>> {
    // SAFETY: the structure is made of integers and pointers, for which zero is a value.
    let mut found: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: the structure is ours, to be filled.
    check(unsafe { libc::waitid(libc::P_ALL, 0, &raw mut found, flags) })?;
    // SAFETY: `waitid` has set the field, or left the zero in it.
    let child = unsafe { found.si_pid() };
    Ok((child != 0).then_some(child))
}

/// Waits until this child has ended, or any if it is -1, and forgets it.
pub fn reap(child: pid_t) -> Result<()> {
    // SAFETY: the status is not asked for.
    check(unsafe { libc::waitpid(child, ptr::null_mut(), 0) }).map(drop)
}

/// A descriptor that can be read when this child has ended.
pub fn watch_child(child: pid_t) -> Result<OwnedFd> {
    // SAFETY: the call takes two numbers.
    let descriptor = unsafe { libc::syscall(libc::SYS_pidfd_open, child, 0) };
    let descriptor = RawFd::try_from(descriptor).ok().filter(|descriptor| *descriptor >= 0);
    let descriptor = descriptor.ok_or_else(Error::last_os_error)?;
    // SAFETY: the descriptor is new, so nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Sends a signal to a group of processes.
pub fn signal_group(group: pid_t, signal: u8) -> Result<()> {
    // SAFETY: it takes two numbers.
    check(unsafe { libc::kill(-group, signal.into()) }).map(drop)
}

/// Mounts a file system without options of its own.
pub fn mount(source: &CStr, target: &CStr, kind: &CStr, flags: libc::c_ulong) -> Result<()> {
    // SAFETY: the strings end with a zero byte, and no options are given.
    check(unsafe { libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, ptr::null()) })
        .map(drop)
}

/// Waits until the console has shown everything.
pub fn drain_console() {
    // SAFETY: it waits for a descriptor, and takes no memory.
    unsafe { libc::tcdrain(libc::STDERR_FILENO) };
}

/// Ends the machine, once the console has shown everything.
pub fn power_off() {
    drain_console();
    // SAFETY: it takes nothing.
    unsafe { libc::sync() };
    // SAFETY: it takes a number.
    unsafe { libc::reboot(libc::RB_POWER_OFF) };
}

fn check(result: c_int) -> Result<c_int> {
    if result < 0 { Err(Error::last_os_error()) } else { Ok(result) }
}
