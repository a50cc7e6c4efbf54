//! The files that a command's output goes to: they may be slow, and others may close them.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, RawFd};

use crate::protocol::ending::Ending;
use crate::run::streams::console::has_room;

/// Maximum size of a write: a pipe that is ready takes this much (`PIPE_BUF`) without blocking.
const MAX_WRITE: usize = 4096;

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
