//! Processes whose parents have died: the kernel hands them to the first process, which has to see them off.

use std::fs::File;
use std::io::{Read, Result};

use libc::pid_t;

use crate::sys;

/// Tells when children have ended.
pub struct Orphans {
    signals: File,
}

impl Orphans {
    /// Watches from now on.
    pub fn new() -> Result<Self> {
        Ok(Self { signals: sys::watch_children()? })
    }

    /// What can be read when there may be something to reap.
    pub fn signals(&self) -> &File {
        &self.signals
    }

    /// Forgets those that have ended, up to `command`: that one is waited for elsewhere.
    pub fn reap(&self, command: pid_t) -> Result<()> {
        let mut signals = [0; size_of::<libc::signalfd_siginfo>()];
        // There is one at most, and there is none if all this was looked after before.
        let _ = (&self.signals).read(&mut signals);
        while let Some(child) = sys::ended_child()?.filter(|child| *child != command) {
            sys::reap(child)?;
        }
        Ok(())
    }

    /// All that is left to do.
    pub fn reap_for_ever() -> ! {
        loop {
            if sys::reap(-1).is_err() {
                // There is no child, and there will be none.
                std::thread::park();
            }
        }
    }
}
