//! Why a run ends, and how threads report that to the event loop.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use devices::End;
use tally_machine::VcpuError;
use vmm_sys_util::eventfd::EventFd;

/// The status of Tally's own failures, so that they cannot be taken for a command's.
pub const FAILURE: u8 = 125;

/// Why the machine ends.
#[derive(Debug)]
pub enum Ending {
    /// The guest has switched itself off, reset itself, or written to the debug exit.
    Guest(End),
    /// A vCPU cannot go on.
    Failed(VcpuError),
    /// The command has ended with this status.
    Command(u8),
    /// The guest was saved as a template.
    Saved,
    /// The guest's agent has failed, for this reason.
    Agent(String),
    /// The command's output cannot be written.
    Output(io::Error),
    /// The user typed Ctrl-A X.
    Quit,
    /// Tally was sent this signal.
    Signal(i32),
}

impl Ending {
    /// Returns whether the user or a signal has ended the machine, so that the rest of its output is not waited for.
    pub fn is_interrupted(&self) -> bool {
        matches!(self, Self::Quit | Self::Signal(_))
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Command(status) => write!(f, "the guest's command ended with status {status}"),
            Self::Saved => write!(f, "the guest was saved"),
            Self::Agent(reason) => write!(f, "{reason}"),
            Self::Output(error) => write!(f, "the command's output cannot be written: {error}"),
            Self::Guest(End::DebugExit(value)) => write!(f, "the guest wrote {value} to the debug exit"),
            Self::Guest(End::PowerOff) => write!(f, "the guest switched itself off"),
            Self::Guest(End::Reboot) => write!(f, "the guest reset"),
            Self::Failed(failure) => write!(f, "the guest cannot go on: {failure}"),
            Self::Quit => write!(f, "the user ended the machine"),
            Self::Signal(signal) => write!(f, "signal {signal} ended the machine"),
        }
    }
}

/// Channel by which threads report the machine's end to the event loop. Clones share it.
#[derive(Debug, Clone)]
pub struct Reporter {
    endings: Sender<Ending>,
    wake: Arc<EventFd>,
}

/// The other end of the channel. As a file, it is readable when an ending was reported.
#[derive(Debug)]
pub struct Endings {
    endings: Receiver<Ending>,
    wake: Arc<EventFd>,
}

impl Reporter {
    /// Creates both ends.
    pub fn new() -> io::Result<(Self, Endings)> {
        let ((sender, endings), wake) = (channel(), Arc::new(EventFd::new(libc::EFD_NONBLOCK)?));
        Ok((Self { endings: sender, wake: Arc::clone(&wake) }, Endings { endings, wake }))
    }

    /// Reports an ending. Only the first counts.
    pub fn report(&self, ending: Ending) {
        // The loop is gone only after an ending was reported.
        let _ = self.endings.send(ending);
        let _ = self.wake.write(1);
    }
}

impl Endings {
    /// Returns the next ending, if one was reported.
    pub fn next(&self) -> Option<Ending> {
        // Non-blocking: an error means that it was read already.
        let _ = self.wake.read();
        self.endings.try_recv().ok()
    }
}

impl AsRawFd for Endings {
    fn as_raw_fd(&self) -> RawFd {
        self.wake.as_raw_fd()
    }
}
