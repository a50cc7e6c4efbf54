//! Signals that end the machine, taken as events rather than by surprise.
//!
//! A thread waits for them and passes them on. A `signalfd` would do without it, but Linux wakes whoever waits for one of a
//! process at every signal that any thread of the process gets: for every sample of a guest, then.

use std::io::{self, PipeReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::thread;

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
pub struct Signals(PipeReader);

impl Signals {
    /// Takes the signals away from this thread and those that it starts from now on.
    pub fn take() -> io::Result<Self> {
        /// It does next to nothing.
        const STACK: usize = 64 << 10;
        // What this process was started to ignore, as by `nohup`, it ignores. Blocked, it would arrive all the same.
        let events: Vec<libc::c_int> = EVENTS.into_iter().filter(|signal| !is_ignored(*signal)).collect();
        let set = set_of(&events);
        mask(libc::SIG_BLOCK, &set)?;
        let (arrived, mut arrives) = io::pipe()?;
        // SAFETY: takes flags; the descriptor is open.
        if unsafe { libc::fcntl(arrived.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) } < 0 {
            return Err(io::Error::last_os_error());
        }
        thread::Builder::new().name("signals".into()).stack_size(STACK).spawn(move || {
            // It ends when nobody wants to know any more.
            while let Some(signal) = wait(&set)
                && arrives.write_all(&[signal]).is_ok()
            {}
        })?;
        Ok(Self(arrived))
    }

    /// The next signal, if one has arrived.
    pub fn next(&self) -> Option<i32> {
        let mut signal = [0];
        match (&self.0).read(&mut signal) {
            Ok(1) => Some(signal[0].into()),
            _ => None,
        }
    }
}

/// The next of these signals, as it arrives.
fn wait(set: &libc::sigset_t) -> Option<u8> {
    let mut signal = 0;
    // SAFETY: both are valid for the call.
    let error = unsafe { libc::sigwait(set, &raw mut signal) };
    if error == 0 { signal.try_into().ok() } else { None }
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
