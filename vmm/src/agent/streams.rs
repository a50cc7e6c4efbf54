//! The ends of a command's streams on this side: files that may be slow, and that others may close.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};

use crate::console::wait_for_room;
use crate::ending::Ending;
use crate::terminal::{Escape, TYPE_AHEAD};

/// How much is read at a time.
const CHUNK: usize = 16 << 10;
/// How much may be written at once: a pipe with room for anything has room for this.
const PIECE: usize = 4096;

/// What a command reads.
pub struct Input {
    file: File,
    /// For what a person types; a file or a pipe has no keys.
    escape: Option<Escape>,
    waiting: VecDeque<u8>,
    ended: bool,
    /// Whether more of it is wanted now.
    pub wanted: bool,
}

impl Input {
    /// A file or a pipe.
    pub fn file(file: File) -> Self {
        Self { file, escape: None, waiting: VecDeque::new(), ended: false, wanted: false }
    }

    /// Somebody's terminal, in raw mode.
    pub fn terminal(file: File) -> Self {
        // From the first moment on, for the keys that end a machine that does not come up.
        Self { escape: Some(Escape::default()), wanted: true, ..Self::file(file) }
    }

    /// Takes note of whether the guest has room for more. What somebody types is wanted in any case.
    pub fn ask(&mut self, has_room: bool) {
        self.wanted = !self.ended && (self.escape.is_some() || has_room && self.waiting.is_empty());
    }

    /// What was read and not given to the guest yet.
    pub fn waiting(&mut self) -> &[u8] {
        self.waiting.make_contiguous()
    }

    /// Takes note that the guest was given so much.
    pub fn given(&mut self, count: usize) {
        self.waiting.drain(..count);
    }

    /// Whether the guest was given all that there will ever be.
    pub fn is_over(&self) -> bool {
        self.ended && self.waiting.is_empty()
    }

    /// Reads what there is. The keys that end the machine are an ending.
    pub fn read(&mut self) -> Option<Ending> {
        let mut bytes = [0; CHUNK];
        let count = match self.file.read(&mut bytes) {
            Ok(count) => count,
            Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {
                return None;
            }
            // What cannot be read has ended: a folder, a terminal that is gone.
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

/// What takes a stream that a command writes.
pub struct Sink {
    file: Option<File>,
    fd: RawFd,
    /// What the machine's end is when nobody reads it any more: a command ends with the reader of its output.
    on_close: OnClose,
    /// Whether there is something to write that it has no room for.
    pub wanted: bool,
}

/// What to do when nobody reads a stream any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnClose {
    /// The machine ends, as SIGPIPE ends a program.
    End,
    /// The rest of the stream is lost.
    Go,
}

impl Sink {
    /// A stream into that file.
    pub fn new(file: File, on_close: OnClose) -> Self {
        Self { fd: file.as_raw_fd(), file: Some(file), on_close, wanted: false }
    }

    /// Writes as much of it as there is room for, without waiting. An error is an ending.
    pub fn take(&mut self, bytes: &[u8]) -> Result<usize, Ending> {
        let Some(file) = &mut self.file else { return Ok(bytes.len()) };
        if !wait_for_room(file, 0) {
            return Ok(0);
        }
        match file.write(&bytes[..bytes.len().min(PIECE)]) {
            Ok(count) => Ok(count),
            Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {
                Ok(0)
            }
            Err(error) => {
                self.file = None;
                match (self.on_close, error.kind()) {
                    (OnClose::Go, _) => Ok(bytes.len()),
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
