//! The host's ends of a command's streams: files that may be slow, and that others may close.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};

use crate::host::terminal::{Escape, TYPE_AHEAD};
use crate::protocol::ending::Ending;
use crate::run::streams::console::has_room;

/// Number of bytes that are read at a time.
const CHUNK: usize = 16 << 10;
/// Maximum size of a write: a pipe that is ready takes this much (`PIPE_BUF`) without blocking.
const MAX_WRITE: usize = 4096;

/// The command's input.
pub struct Input {
    file: File,
    /// Finds Ctrl-A X in what a person types; none if the input is no terminal.
    escape: Option<Escape>,
    waiting: VecDeque<u8>,
    ended: bool,
    /// True if more input is wanted now.
    pub wanted: bool,
}

impl Input {
    /// Creates an input from a file or a pipe.
    pub fn file(file: File) -> Self {
        Self { file, escape: None, waiting: VecDeque::new(), ended: false, wanted: false }
    }

    /// Creates an input from the user's terminal, in raw mode.
    pub fn terminal(file: File) -> Self {
        // Wanted from the beginning, for Ctrl-A X ends a machine that does not come up.
        Self { escape: Some(Escape::default()), wanted: true, ..Self::file(file) }
    }

    /// Records whether the guest has room for more. A person's input is wanted in any case.
    pub fn set_guest_has_room(&mut self, has_room: bool) {
        self.wanted = !self.ended && (self.escape.is_some() || has_room && self.waiting.is_empty());
    }

    /// Returns the bytes that were read and not given to the guest yet.
    pub fn waiting(&mut self) -> &[u8] {
        self.waiting.make_contiguous()
    }

    /// Returns the bytes that were read and not given to the guest yet, for a snapshot.
    pub fn rest(&self) -> Vec<u8> {
        self.waiting.iter().copied().collect()
    }

    /// Puts bytes in front of all that is read.
    pub fn put_first(&mut self, bytes: &[u8]) {
        self.waiting.extend(bytes);
    }

    /// Removes bytes that the guest was given.
    pub fn consume(&mut self, count: usize) {
        self.waiting.drain(..count);
    }

    /// Returns true if the input has ended and the guest was given all of it.
    pub fn is_over(&self) -> bool {
        self.ended && self.waiting.is_empty()
    }

    /// Reads the available bytes. Returns an ending if they have Ctrl-A X.
    pub fn read(&mut self) -> Option<Ending> {
        let mut bytes = [0; CHUNK];
        let count = match self.file.read(&mut bytes) {
            Ok(count) => count,
            Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {
                return None;
            }
            // Any other error ends the input: it is a directory, or a terminal that is gone.
            Err(_) => 0,
        };
        self.ended |= count == 0;
        let Some(escape) = &mut self.escape else {
            self.waiting.extend(&bytes[..count]);
            return None;
        };
        let quits = escape.feed(&bytes[..count], &mut self.waiting);
        self.waiting.truncate(TYPE_AHEAD);
        quits.then_some(Ending::Quit)
    }
}

impl AsRawFd for Input {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

/// Sink for a stream that the command writes.
pub struct Sink {
    file: Option<File>,
    fd: RawFd,
    /// What to do when nobody reads the stream any more.
    on_close: OnClose,
    /// True if there is something to write for which the file has no room.
    pub wanted: bool,
}

/// What to do when nobody reads a stream any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnClose {
    /// End the machine, as SIGPIPE ends a program.
    End,
    /// Drop the rest of the stream.
    Discard,
}

impl Sink {
    /// Creates a sink that writes to this file.
    pub fn new(file: File, on_close: OnClose) -> Self {
        Self { fd: file.as_raw_fd(), file: Some(file), on_close, wanted: false }
    }

    /// Writes as many of these bytes as the file takes without blocking. Returns their number, or an ending.
    pub fn write(&mut self, bytes: &[u8]) -> Result<usize, Ending> {
        let Some(file) = &mut self.file else { return Ok(bytes.len()) };
        if !has_room(file) {
            return Ok(0);
        }
        match file.write(&bytes[..bytes.len().min(MAX_WRITE)]) {
            Ok(count) => Ok(count),
            Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {
                Ok(0)
            }
            Err(error) => {
                self.file = None;
                match (self.on_close, error.kind()) {
                    (OnClose::Discard, _) => Ok(bytes.len()),
                    (OnClose::End, io::ErrorKind::BrokenPipe) => Err(Ending::Signal(libc::SIGPIPE)),
                    (OnClose::End, _) => Err(Ending::Output(error)),
                }
            }
        }
    }
}

impl AsRawFd for Sink {
    fn as_raw_fd(&self) -> RawFd {
        self.fd
    }
}
