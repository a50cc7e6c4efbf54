//! The body of a response (RFC 9112, section 6).

use std::io::{self, BufRead, BufReader, ErrorKind, Read, Result};
use std::net::TcpStream;

/// Maximum length of the line before a chunk.
const MAX_LINE: u64 = 1024;

/// A body. Reading fails if the connection ends before the body does.
pub struct Body<R = TcpStream> {
    stream: BufReader<R>,
    left: Left,
}

enum Left {
    /// A known number of bytes.
    Bytes(u64),
    /// This much of a chunk, and more chunks.
    Chunks(u64),
    /// Whatever comes before the server closes the connection.
    Unknown,
    Nothing,
}

impl<R: Read> Body<R> {
    pub(super) fn new(stream: BufReader<R>, length: Option<u64>, is_chunked: bool) -> Self {
        let left = match length {
            _ if is_chunked => Left::Chunks(0),
            Some(length) => Left::Bytes(length),
            None => Left::Unknown,
        };
        Self { stream, left }
    }

    /// Reads a line without its end.
    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.stream.by_ref().take(MAX_LINE).read_line(&mut line)?;
        let complete = line.strip_suffix('\n').ok_or(ErrorKind::UnexpectedEof)?;
        Ok(complete.trim_end().to_owned())
    }

    /// Reads the size of the next chunk.
    fn next_chunk(&mut self) -> Result<u64> {
        let line = self.line()?;
        let size = line.split(';').next().unwrap_or_default().trim();
        u64::from_str_radix(size, 16).map_err(io::Error::other)
    }

    fn read_up_to(&mut self, buffer: &mut [u8], limit: u64) -> Result<usize> {
        let size = usize::try_from(limit).map_or(buffer.len(), |limit| limit.min(buffer.len()));
        match self.stream.read(&mut buffer[..size])? {
            0 if size > 0 => Err(ErrorKind::UnexpectedEof.into()),
            length => Ok(length),
        }
    }
}

impl<R: Read> Read for Body<R> {
    fn read(&mut self, buffer: &mut [u8]) -> Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        if matches!(self.left, Left::Chunks(0)) {
            self.left = match self.next_chunk()? {
                0 => Left::Nothing,
                size => Left::Chunks(size),
            };
        }
        match self.left {
            Left::Nothing | Left::Bytes(0) => Ok(0),
            Left::Unknown => self.stream.read(buffer),
            Left::Bytes(left) => {
                let length = self.read_up_to(buffer, left)?;
                self.left = Left::Bytes(left - length as u64);
                Ok(length)
            }
            Left::Chunks(left) => {
                let length = self.read_up_to(buffer, left)?;
                let left = left - length as u64;
                self.left = Left::Chunks(left);
                if left == 0 {
                    self.line()?;
                }
                Ok(length)
            }
        }
    }
}
