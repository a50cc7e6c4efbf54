//! Signals that end the machine, taken as events rather than by surprise.
//!
//! A thread waits for them and passes them on. A `signalfd` would do without it, but Linux wakes whoever waits for one of a
//! process at every signal that any thread of the process gets: for every sample of a guest, then.

use std::io::{self, PipeReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::ptr;
use std::thread::{self, JoinHandle};

use rustix::fs::OFlags;
use rustix::process::{Signal, getpid, kill_process};
use vmm_sys_util::signal::{Killable, create_sigset};

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
        rustix::fs::fcntl_setfl(&arrived, OFlags::NONBLOCK)?;
        hold_back()?;
        let set = set_of(&[events(), vec![enough()]].concat());
        // The thread has it blocked from its beginning on, and nobody else does.
        mask(libc::SIG_BLOCK, &set_of(&[enough()]))?;
        let thread = thread::Builder::new().name("signals".into()).stack_size(STACK).spawn(move || {
            while let Some(signal) = wait(&set).filter(|signal| *signal != enough()) {
                // A number is one byte. Nobody else writes there, and it is read by whoever drops the other end, too.
                let _ = u8::try_from(signal).map(|signal| pass_on.write_all(&[signal]));
            }
        });
        unblock(&[enough()])?;
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
            let _ = thread.kill(enough());
            let _ = thread.join();
        }
        while let Some(signal) = self.next() {
            // The signal is blocked here, and stays pending until it no longer is.
            let _ = Signal::from_named_raw(signal).map(|signal| kill_process(getpid(), signal));
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
    mask(libc::SIG_BLOCK, &set_of(&events())).map(drop)
}

/// Lets the signals do again what they do by themselves.
pub fn give_back() -> io::Result<()> {
    unblock(&EVENTS)
}

/// Has these signals wait in this thread; which others do so, a bit for each from the first on.
pub fn hold(set: &libc::sigset_t) -> io::Result<u64> {
    let before = mask(libc::SIG_BLOCK, set)?;
    // SAFETY: the sets are valid, and so are the signals.
    let is_in = |set, signal| unsafe { libc::sigismember(set, signal) == 1 };
    let all = (1..=64).filter(|signal| is_in(&raw const before, *signal) && !is_in(set, *signal));
    Ok(all.fold(0, |bits, signal| bits | 1 << (signal - 1)))
}

/// One of these signals, if it waits in this thread.
pub fn next_of(set: &libc::sigset_t) -> Option<libc::c_int> {
    let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: all are valid for the call; what else there is to know is not asked for.
    let signal = unsafe { libc::sigtimedwait(set, ptr::null_mut(), &raw const at_once) };
    (signal > 0).then_some(signal)
}

/// Lets these signals arrive in this thread and those that it starts from now on.
fn unblock(signals: &[libc::c_int]) -> io::Result<()> {
    mask(libc::SIG_UNBLOCK, &set_of(signals)).map(drop)
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

/// These signals.
pub fn set_of(signals: &[libc::c_int]) -> libc::sigset_t {
    create_sigset(signals).expect("Linux has these signals")
}

/// Changes what this thread blocks, and says what it blocked before.
fn mask(how: libc::c_int, set: &libc::sigset_t) -> io::Result<libc::sigset_t> {
    let mut before = set_of(&[]);
    // SAFETY: both sets are valid.
    let error = unsafe { libc::pthread_sigmask(how, set, &raw mut before) };
    if error == 0 { Ok(before) } else { Err(io::Error::from_raw_os_error(error)) }
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
