//! The only reader of standard input, for the guest's console and for its command alike.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, RawFd};

use crate::host::terminal::{Escape, TYPE_AHEAD};
use crate::protocol::ending::Ending;

/// Maximum number of bytes that are read at a time.
pub const CHUNK: usize = 16 << 10;

/// Standard input, and what was read of it that the guest has not taken.
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

    /// Returns true if this is a regular file, which is ready at any time.
    pub fn is_regular(&self) -> bool {
        self.file.metadata().is_ok_and(|metadata| metadata.is_file())
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

    /// Reads the available bytes, at most so many and [`CHUNK`]. Returns an ending if they have Ctrl-A X.
    pub fn read(&mut self, most: usize) -> Option<Ending> {
        let mut bytes = [0; CHUNK];
        let count = match self.file.read(&mut bytes[..most.min(CHUNK)]) {
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
