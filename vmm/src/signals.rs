//! Signals that end the machine, taken as events rather than by surprise.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// What is an event when it arrives: all but the last end the machine, unless a command takes them.
const EVENTS: [libc::c_int; 10] = [
    libc::SIGTERM,
    libc::SIGINT,
    libc::SIGHUP,
    libc::SIGQUIT,
    libc::SIGALRM,
    libc::SIGVTALRM,
    libc::SIGPROF,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGWINCH,
];

/// What is passed on to a command that runs.
pub const FOR_THE_COMMAND: [libc::c_int; 4] = [libc::SIGINT, libc::SIGQUIT, libc::SIGUSR1, libc::SIGUSR2];

/// The signals, readable as a file.
#[derive(Debug)]
pub struct Signals(OwnedFd);

impl Signals {
    /// Takes the signals away from this thread and those that it starts from now on.
    pub fn take() -> io::Result<Self> {
        // What this process was started to ignore, as by `nohup`, it ignores. Blocked, it would arrive all the same.
        let events: Vec<libc::c_int> = EVENTS.into_iter().filter(|signal| !is_ignored(*signal)).collect();
        let set = set_of(&events);
        mask(libc::SIG_BLOCK, &set)?;
        // SAFETY: `set` is initialised.
        let fd = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and nobody else has it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// The next signal, if one has arrived.
    pub fn next(&self) -> Option<i32> {
        // SAFETY: all-zero is a valid `signalfd_siginfo`, a plain C structure of integers.
        let mut info: libc::signalfd_siginfo = unsafe { std::mem::zeroed() };
        let size = size_of_val(&info);
        // SAFETY: `info` is valid for `size` bytes.
        let count = unsafe { libc::read(self.0.as_raw_fd(), (&raw mut info).cast(), size) };
        (usize::try_from(count) == Ok(size)).then(|| info.ssi_signo.cast_signed())
    }
}

/// Lets the signals do again what they do by themselves.
pub fn give_back() -> io::Result<()> {
    unblock(&EVENTS)
}

/// Lets these signals arrive in this thread and those that it starts from now on.
pub fn unblock(signals: &[libc::c_int]) -> io::Result<()> {
    mask(libc::SIG_UNBLOCK, &set_of(signals))
}

/// Has a write that would make a file larger than this process may make any (`ulimit -f`) fail, and not end the process.
pub fn outlive_too_large_files() {
    // SAFETY: ignoring a signal runs no code.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

fn is_ignored(signal: libc::c_int) -> bool {
    // SAFETY: all-zero is a valid `sigaction`: no flags, an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: nothing is changed, and `action` is a valid place for the answer.
    let failed = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) } != 0;
    !failed && action.sa_sigaction == libc::SIG_IGN
}

fn set_of(signals: &[libc::c_int]) -> libc::sigset_t {
    // SAFETY: all-zero is a valid `sigset_t`; `sigemptyset` then makes it an empty one whatever that means here.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is valid.
    unsafe { libc::sigemptyset(&raw mut set) };
    for signal in signals {
        // SAFETY: `set` is valid, and so is the signal.
        unsafe { libc::sigaddset(&raw mut set, *signal) };
    }
    set
}

fn mask(how: libc::c_int, set: &libc::sigset_t) -> io::Result<()> {
    // SAFETY: `set` is initialised; the old mask is not asked for.
    let error = unsafe { libc::pthread_sigmask(how, set, std::ptr::null_mut()) };
    if error == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error)) }
}

impl AsRawFd for Signals {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
