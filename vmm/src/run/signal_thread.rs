//! Signals as events: a thread waits for signals and writes them into a pipe. A `signalfd` would need no thread, but
//! Linux wakes its readers at every signal to any thread of the process, so for every sample of a guest.

use std::io::{self, PipeReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::thread::{self, JoinHandle};

use rustix::fs::OFlags;
use rustix::process::{Signal, getpid, kill_process};
use tally_machine::signals::{block, set_of, unblock};
use vmm_sys_util::signal::Killable;

use crate::host::signals::{block_events, events};
use crate::sandbox::{Confinement, Thread};

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
