//! One way of one stream, from a descriptor to another one, neither of which makes it wait.
//!
//! What has been read is written before more is read, so a stream whose receiver is slow takes a buffer and no more.

use std::fs::File;
use std::io::{ErrorKind, Read, Result, Write};
use std::os::fd::AsRawFd;
use std::rc::Rc;

use libc::{POLLERR, POLLHUP, POLLIN, POLLOUT, pollfd};

/// The most that is moved at once: what a pipe holds.
const CHUNK: usize = 64 << 10;
/// More than a pipe or a terminal holds of what has been written to it.
const REST: usize = 1 << 20;

/// A stream. Its ends are closed with it, unless they have other owners.
pub struct Flow {
    from: Rc<File>,
    to: Rc<File>,
    buffer: Box<[u8]>,
    /// How much of the buffer was read, and how much of that was written.
    filled: usize,
    written: usize,
}

/// What came of an attempt to move something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moved {
    /// This much was read.
    Read(usize),
    /// Something was written.
    Written,
    /// There is nothing to read at the moment.
    Nothing,
    /// The receiver takes nothing at the moment.
    Blocked,
    /// There is nothing more to read, or nobody to write it to.
    Over,
}

/// Whether a stream goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Open,
    Over,
}

impl Flow {
    /// A stream from one descriptor to another.
    pub fn new(from: &Rc<File>, to: &Rc<File>) -> Self {
        let buffer = vec![0; CHUNK].into_boxed_slice();
        Self { from: Rc::clone(from), to: Rc::clone(to), buffer, filled: 0, written: 0 }
    }

    /// What it waits for.
    pub fn waits_for(&self) -> pollfd {
        let (file, events) =
            if self.written < self.filled { (&self.to, POLLOUT) } else { (&self.from, POLLIN) };
        pollfd { fd: file.as_raw_fd(), events, revents: 0 }
    }

    /// Goes on, if what it waited for has happened.
    pub fn go_on(&mut self, happened: pollfd) -> State {
        if happened.revents == 0 {
            return State::Open;
        }
        if is_cut_off(happened) {
            return State::Over;
        }
        let mut moved = self.step();
        if let Moved::Read(_) = moved {
            moved = self.step();
        }
        if moved == Moved::Over { State::Over } else { State::Open }
    }

    /// One read, or one write if there is something to write.
    fn step(&mut self) -> Moved {
        if self.written < self.filled {
            match now(|| (&*self.to).write(&self.buffer[self.written..self.filled])) {
                Ok(Some(length)) => {
                    self.written += length;
                    Moved::Written
                }
                Ok(None) => Moved::Blocked,
                Err(_) => Moved::Over,
            }
        } else {
            match now(|| (&*self.from).read(&mut self.buffer)) {
                Ok(Some(0)) | Err(_) => Moved::Over,
                Ok(Some(length)) => {
                    (self.filled, self.written) = (length, 0);
                    Moved::Read(length)
                }
                Ok(None) => Moved::Nothing,
            }
        }
    }
}

/// A stream whose writer has ended. Others may still write to it, and are not waited for.
pub struct Ending {
    flow: Flow,
    /// How much may still be read.
    left: usize,
}

impl Ending {
    /// What is in the stream by now is its rest.
    pub fn new(flow: Flow) -> Self {
        Self { flow, left: REST }
    }

    /// What it waits for.
    pub fn waits_for(&self) -> pollfd {
        self.flow.waits_for()
    }

    /// Moves what can be moved. The stream is over when its rest has been written.
    pub fn go_on(&mut self, happened: pollfd) -> State {
        if is_cut_off(happened) {
            return State::Over;
        }
        loop {
            if self.flow.written == self.flow.filled && self.left == 0 {
                return State::Over;
            }
            match self.flow.step() {
                Moved::Read(length) => self.left = self.left.saturating_sub(length),
                Moved::Written => {}
                Moved::Blocked => return State::Open,
                Moved::Nothing | Moved::Over => return State::Over,
            }
        }
    }
}

/// Whether this is a port that the host has closed: it takes nothing more, and its writers are not told.
pub fn is_cut_off(happened: pollfd) -> bool {
    happened.events == POLLOUT
        && happened.revents & POLLOUT == 0
        && happened.revents & (POLLHUP | POLLERR) != 0
}

/// Reads or writes, unless that would have to wait.
pub fn now(mut attempt: impl FnMut() -> Result<usize>) -> Result<Option<usize>> {
    loop {
        match attempt() {
            Ok(length) => return Ok(Some(length)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
