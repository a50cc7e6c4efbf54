//! Why a run ends, and how threads report that to the event loop.

use std::fmt;
use std::io;
use std::sync::mpsc::Sender;

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

/// Channel by which other threads report the machine's end to the loop.
#[derive(Debug)]
pub struct Reporter {
    endings: Sender<Ending>,
    wake: EventFd,
}

impl Reporter {
    /// Creates a reporter to the receiver of `endings`, which `wake` wakes.
    pub fn new(endings: Sender<Ending>, wake: EventFd) -> Self {
        Self { endings, wake }
    }

    /// Reports an ending. Only the first counts.
    pub fn report(&self, ending: Ending) {
        // The loop is gone only after an ending was reported.
        let _ = self.endings.send(ending);
        let _ = self.wake.write(1);
    }
}
