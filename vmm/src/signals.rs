//! Signals that end the machine, taken as events rather than by surprise.
//!
//! A thread waits for them and passes them on. A `signalfd` would do without it, but Linux wakes whoever waits for one of a
//! process at every signal that any thread of the process gets: for every sample of a guest, then.

use std::io::{self, PipeReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::thread::JoinHandleExt;
use std::ptr;
use std::thread::{self, JoinHandle};

use tally_machine::signals::{block, set_of, unblock};

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

/// The signals, readable as a file, as long as it is there. Those that nobody has read then are as if they had just arrived.
#[derive(Debug)]
pub struct Signals {
    arrived: PipeReader,
    thread: Option<JoinHandle<()>>,
}

impl Signals {
    /// Takes the signals away from this thread and those that it starts from now on.
    pub fn take() -> io::Result<Self> {
        /// It does next to nothing.
        const STACK: usize = 64 << 10;
        let (arrived, mut pass_on) = io::pipe()?;
        // SAFETY: takes flags; the descriptor is open.
        if unsafe { libc::fcntl(arrived.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) } < 0 {
            return Err(io::Error::last_os_error());
        }
        hold_back()?;
        let set = set_of(&[events(), vec![enough()]].concat());
        // The thread has it blocked from its beginning on, and nobody else does.
        block(&set_of(&[enough()]))?;
        let thread = thread::Builder::new().name("signals".into()).stack_size(STACK).spawn(move || {
            while let Some(signal) = wait(&set).filter(|signal| *signal != enough()) {
                // A number is one byte. Nobody else writes there, and it is read by whoever drops the other end, too.
                let _ = u8::try_from(signal).map(|signal| pass_on.write_all(&[signal]));
            }
        });
        unblock(&set_of(&[enough()]))?;
        Ok(Self { arrived, thread: Some(thread?) })
    }

    /// The next signal, if one has arrived.
    pub fn next(&self) -> Option<i32> {
        let mut signal = [0];
        match (&self.arrived).read(&mut signal) {
            Ok(1) => Some(signal[0].into()),
            _ => None,
        }
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            // SAFETY: it has not been joined, and so it exists.
            unsafe { libc::pthread_kill(thread.as_pthread_t(), enough()) };
            let _ = thread.join();
        }
        let own = std::process::id().cast_signed();
        while let Some(signal) = self.next() {
            // SAFETY: takes numbers. It is blocked here, and waits until it no longer is.
            unsafe { libc::kill(own, signal) };
        }
    }
}

/// What tells the thread that waits for signals to end.
fn enough() -> libc::c_int {
    libc::SIGRTMIN() + 1
}

/// The next of these signals, as it arrives.
fn wait(set: &libc::sigset_t) -> Option<libc::c_int> {
    let mut signal = 0;
    // SAFETY: both are valid for the call.
    let error = unsafe { libc::sigwait(set, &raw mut signal) };
    (error == 0).then_some(signal)
}

/// What this process was started to ignore, as by `nohup`, it ignores. Blocked, it would arrive all the same.
fn events() -> Vec<libc::c_int> {
    EVENTS.into_iter().filter(|signal| !is_ignored(*signal)).collect()
}

/// Has the signals wait in this thread, and those that it starts from now on, until they are given back.
pub fn hold_back() -> io::Result<()> {
    block(&set_of(&events())).map(drop)
}

/// Lets the signals do again what they do by themselves.
pub fn give_back() -> io::Result<()> {
    unblock(&set_of(&EVENTS))
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
    let failed = unsafe { libc::sigaction(signal, ptr::null(), &raw mut action) } != 0;
    !failed && action.sa_sigaction == libc::SIG_IGN
}

impl AsRawFd for Signals {
    fn as_raw_fd(&self) -> RawFd {
        self.arrived.as_raw_fd()
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.arrived.as_fd()
    }
}
