//! Reaps orphaned processes, which the kernel reparents to process 1.

use std::fs::File;
use std::io::{Read, Result};

use libc::pid_t;

use crate::sys;

/// Watches for children that have ended.
pub struct Orphans {
    signals: File,
}

impl Orphans {
    /// Starts to watch.
    pub fn new() -> Result<Self> {
        Ok(Self { signals: sys::child_signals()? })
    }

    /// Returns a descriptor that is readable when there may be a process to reap.
    pub fn signals(&self) -> &File {
        &self.signals
    }

    /// Reaps the processes that have ended, except for `command`, which is waited for elsewhere. Stops at `command`,
    /// because `waitid` would return it again.
    pub fn reap(&self, command: pid_t) -> Result<()> {
        let mut signals = [0; size_of::<libc::signalfd_siginfo>()];
        // There is at most one pending SIGCHLD. The read fails if there is none.
        let _ = (&self.signals).read(&mut signals);
        while let Some(child) = sys::ended_child()?.filter(|child| *child != command) {
            sys::reap(child)?;
        }
        Ok(())
    }

    /// Reaps children without end.
    pub fn reap_for_ever() -> ! {
        loop {
            if sys::reap(-1).is_err() {
                // There are no children, and no new ones can appear.
                std::thread::park();
            }
        }
    }
}
