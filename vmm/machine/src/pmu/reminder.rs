//! Calls the vCPU's thread out of the guest when it may have an interrupt that had to wait: the guest gives no occasion for it.

use std::io;
use std::time::Duration;

use super::timer::{Rings, Timer};

/// A thread's reminder.
pub struct Reminder {
    timer: Timer,
    is_set: bool,
}

impl Reminder {
    /// One of this thread, which sends this signal.
    pub fn new(signal: libc::c_int) -> io::Result<Self> {
        Ok(Self { timer: Timer::new(signal)?, is_set: false })
    }

    /// Has it come in so much time, unless it is to come anyway. One for which there is no need any more may come all the same.
    pub fn set(&mut self, left: Duration) {
        if !self.is_set {
            self.timer.set(Rings::Once(left));
            self.is_set = true;
        }
    }

    /// After a signal, which it may have been.
    pub fn came(&mut self) {
        self.is_set = false;
    }
}
