//! Signals as events, and signal masks.
//!
//! A thread waits for signals and writes them into a pipe. A `signalfd` would need no thread, but Linux wakes its
//! readers at every signal to any thread of the process, so for every sample of a guest.

use std::io::{self, PipeReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::ptr;
use std::thread::{self, JoinHandle};

use rustix::fs::OFlags;
use rustix::process::{Signal, getpid, kill_process};
use tally_machine::signals::{block, set_of, unblock};
use vmm_sys_util::signal::Killable;

use crate::sandbox::{Confinement, Thread};

/// Signals that are events. All but the last three end the machine, unless they are passed on to a command.
const EVENTS: [libc::c_int; 12] = [
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
    libc::SIGTSTP,
    libc::SIGCONT,
];

/// Signals that are passed on to a running command.
pub const FOR_THE_COMMAND: [libc::c_int; 4] = [libc::SIGINT, libc::SIGQUIT, libc::SIGUSR1, libc::SIGUSR2];

/// Signals that have arrived, readable as a file. When this is dropped, signals that nobody has read are sent to this
/// process again.
#[derive(Debug)]
pub struct Signals {
    arrived: PipeReader,
    thread: Option<JoinHandle<()>>,
}

impl Signals {
    /// Blocks the signals in this thread and those that it starts from now on, and starts the thread that waits for
    /// them.
    pub fn start() -> io::Result<Self> {
        /// The thread calls next to nothing.
        const STACK: usize = 64 << 10;
        let (arrived, mut arrivals) = io::pipe()?;
        rustix::fs::fcntl_setfl(&arrived, OFlags::NONBLOCK)?;
        block_events()?;
        let set = set_of(&[events(), vec![end_signal()]].concat());
        // The new thread inherits this blocked signal; here it is unblocked again.
        block(&set_of(&[end_signal()]))?;
        let confinement = Confinement::new(Thread::Signals, Vec::new());
        let thread = thread::Builder::new().name("signals".into()).stack_size(STACK).spawn(move || {
            confinement.enter();
            while let Some(signal) = wait(&set).filter(|signal| *signal != end_signal()) {
                // The write cannot fail: the reader outlives this thread.
                let _ = u8::try_from(signal).map(|signal| arrivals.write_all(&[signal]));
            }
        });
        unblock(&set_of(&[end_signal()]))?;
        Ok(Self { arrived, thread: Some(thread?) })
    }

    /// Returns the next signal, if one has arrived.
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
            let _ = thread.kill(end_signal());
            let _ = thread.join();
        }
        while let Some(signal) = self.next() {
            // The signal is blocked here, and stays pending until it no longer is.
            let _ = Signal::from_named_raw(signal).map(|signal| kill_process(getpid(), signal));
        }
    }
}

/// Returns the signal that ends the thread that waits.
fn end_signal() -> libc::c_int {
    libc::SIGRTMIN() + 1
}

/// Waits for one of these signals.
fn wait(set: &libc::sigset_t) -> Option<libc::c_int> {
    let mut signal = 0;
    // SAFETY: both pointers are valid for the call.
    let error = unsafe { libc::sigwait(set, &raw mut signal) };
    (error == 0).then_some(signal)
}

/// Returns [`EVENTS`] without the signals that this process was started to ignore, as by `nohup`. Blocked, these would
/// arrive.
fn events() -> Vec<libc::c_int> {
    EVENTS.into_iter().filter(|signal| !is_ignored(*signal)).collect()
}

/// Blocks the signals in this thread, and in those that it starts from now on, until [`unblock_events`].
pub fn block_events() -> io::Result<()> {
    block(&set_of(&events())).map(drop)
}

/// Unblocks the signals, which have their default actions.
pub fn unblock_events() -> io::Result<()> {
    unblock(&set_of(&EVENTS))
}

/// Signals by which users and systems end a command.
const ENDS: [libc::c_int; 4] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT];

/// Blocks the signals that end a command, so that it can end by itself.
pub fn block_ends() -> io::Result<()> {
    block(&set_of(&ENDS)).map(drop)
}

/// Returns true if a signal that [`block_ends`] has blocked has arrived.
pub fn is_end_pending() -> bool {
    // SAFETY: all-zero is a valid set, and the call fills it.
    let mut pending: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    unsafe { libc::sigpending(&raw mut pending) };
    // SAFETY: the set is valid, and the signals exist.
    ENDS.into_iter().any(|signal| unsafe { libc::sigismember(&raw const pending, signal) } == 1)
}

/// Stops this process as SIGTSTP does by default, which [`block_events`] has blocked. Returns when it is continued, or at
/// once if no shell could continue it (its process group is orphaned).
pub fn stop() {
    let stop = set_of(&[libc::SIGTSTP]);
    // Without the signal unblocked there is no stop, and nothing to do about that.
    if unblock(&stop).is_ok() {
        // SAFETY: the call takes a number. The signal goes to this thread, so the one that waits for signals cannot take it,
        // and its default action runs nothing of ours.
        unsafe { libc::raise(libc::SIGTSTP) };
        let _ = block(&stop);
    }
}

/// Ignores SIGXFSZ: a write beyond the limit of a file's size (`ulimit -f`) fails, and does not end the process.
pub fn ignore_sigxfsz() {
    // SAFETY: ignoring a signal runs no code.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

fn is_ignored(signal: libc::c_int) -> bool {
    // SAFETY: all-zero is a valid `sigaction`: no flags, an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: no action is set, and `action` is valid for the answer.
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
