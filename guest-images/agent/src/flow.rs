//! Copies bytes in one direction, between two non-blocking descriptors.
//!
//! All data is written before more is read, so a stream with a slow receiver needs no more than one buffer.

use std::fs::File;
use std::io::{ErrorKind, Read, Result, Write};
use std::os::fd::AsRawFd;
use std::rc::Rc;

use libc::{POLLERR, POLLHUP, POLLIN, POLLOUT, pollfd};

/// Size of the buffer: the capacity of a pipe.
const CHUNK: usize = 64 << 10;
/// Maximum number of bytes that are drained, more than a pipe or a terminal buffers.
const MAX_DRAIN: usize = 1 << 20;

/// A stream. Dropping it closes its descriptors, unless they have other owners.
pub struct Flow {
    from: Rc<File>,
    to: Rc<File>,
    buffer: Box<[u8]>,
    /// Number of bytes in the buffer, and how many of them have been written.
    filled: usize,
    written: usize,
}

/// Result of one read or write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Transfer {
    /// This many bytes were read.
    Read(usize),
    /// Some bytes were written.
    Written,
    /// Nothing can be read at the moment.
    Nothing,
    /// Nothing can be written at the moment.
    Blocked,
    /// The end of the input, or an error.
    Ended,
}

/// The state of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Open,
    Ended,
}

impl Flow {
    /// Creates a stream from one descriptor to another.
    pub fn new(from: &Rc<File>, to: &Rc<File>) -> Self {
        let buffer = vec![0; CHUNK].into_boxed_slice();
        Self { from: Rc::clone(from), to: Rc::clone(to), buffer, filled: 0, written: 0 }
    }

    /// Returns the descriptor and events to poll for.
    pub fn poll_fd(&self) -> pollfd {
        let (file, events) =
            if self.written < self.filled { (&self.to, POLLOUT) } else { (&self.from, POLLIN) };
        pollfd { fd: file.as_raw_fd(), events, revents: 0 }
    }

    /// Copies data, as the result of poll allows.
    pub fn handle(&mut self, polled: pollfd) -> State {
        if polled.revents == 0 {
            return State::Open;
        }
        if is_peer_closed(polled) {
            return State::Ended;
        }
        let mut moved = self.step();
        if let Transfer::Read(_) = moved {
            moved = self.step();
        }
        if moved == Transfer::Ended { State::Ended } else { State::Open }
    }

    /// Writes once if the buffer has data, otherwise reads once.
    fn step(&mut self) -> Transfer {
        if self.written < self.filled {
            match try_io(|| (&*self.to).write(&self.buffer[self.written..self.filled])) {
                Ok(Some(length)) => {
                    self.written += length;
                    Transfer::Written
                }
                Ok(None) => Transfer::Blocked,
                Err(_) => Transfer::Ended,
            }
        } else {
            match try_io(|| (&*self.from).read(&mut self.buffer)) {
                Ok(Some(0)) | Err(_) => Transfer::Ended,
                Ok(Some(length)) => {
                    (self.filled, self.written) = (length, 0);
                    Transfer::Read(length)
                }
                Ok(None) => Transfer::Nothing,
            }
        }
    }
}

/// A stream whose writer has ended. Only data that is buffered already is copied, even if other processes can still
/// write.
pub struct DrainingFlow {
    flow: Flow,
    /// Number of bytes that may still be read.
    remaining: usize,
}

impl DrainingFlow {
    /// Starts to drain a stream.
    pub fn new(flow: Flow) -> Self {
        Self { flow, remaining: MAX_DRAIN }
    }

    /// Returns the descriptor and events to poll for.
    pub fn poll_fd(&self) -> pollfd {
        self.flow.poll_fd()
    }

    /// Copies what can be copied. The stream ends when all buffered data has been written.
    pub fn handle(&mut self, polled: pollfd) -> State {
        if is_peer_closed(polled) {
            return State::Ended;
        }
        loop {
            if self.flow.written == self.flow.filled && self.remaining == 0 {
                return State::Ended;
            }
            match self.flow.step() {
                Transfer::Read(length) => self.remaining = self.remaining.saturating_sub(length),
                Transfer::Written => {}
                Transfer::Blocked => return State::Open,
                Transfer::Nothing | Transfer::Ended => return State::Ended,
            }
        }
    }
}

/// Returns true for a port to be written that the host has closed. Writes to such a port would block rather than fail.
pub fn is_peer_closed(polled: pollfd) -> bool {
    polled.events == POLLOUT && polled.revents & POLLOUT == 0 && polled.revents & (POLLHUP | POLLERR) != 0
}

/// Reads or writes. Returns `None` if that would block.
pub fn try_io(mut attempt: impl FnMut() -> Result<usize>) -> Result<Option<usize>> {
    loop {
        match attempt() {
            Ok(length) => return Ok(Some(length)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
