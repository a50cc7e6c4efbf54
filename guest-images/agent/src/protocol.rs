//! The messages on the control port, and which port is for what.
//!
//! A message is a frame: its kind in one byte, the length of its payload in four (little-endian), and the payload. Neither
//! side trusts the other: the guest may be hostile, and a frame that is longer than [`LONGEST`] or says nothing that is
//! known is an [`Error`], never an allocation.

mod frame;
mod start;
#[cfg(test)]
mod tests;

use std::fmt;

pub use frame::{Decoder, LONGEST, Message};
pub use start::{Access, Share, Start, Terminals};

/// The port that messages go through, both ways.
pub const CONTROL: u32 = 0;
/// What the command reads, unless that is a terminal.
pub const STDIN: u32 = 1;
/// What it writes, unless that is a terminal.
pub const STDOUT: u32 = 2;
/// Its errors, unless they go to a terminal.
pub const STDERR: u32 = 3;
/// The terminal, both ways, for those of its streams that are one.
pub const TERMINAL: u32 = 4;
/// Not the agent's: scripts in the guest write reports for the host to it.
pub const REPORT: u32 = 5;

/// What the host tells the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToGuest {
    /// What to run, and where. The first message, and the only one of its kind.
    Start(Start),
    /// The terminal has another size.
    Size(Size),
    /// Send this signal to the command.
    Signal(u8),
}

/// What the agent tells the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToHost {
    /// It is there, and waits for [`ToGuest::Start`].
    Ready,
    /// The command was sent this signal.
    Took(u8),
    /// The command has ended with this status, and all that it had written is in the ports' queues.
    Exited(u8),
    /// It cannot do what it was told, in a line for the user.
    Failed(String),
}

/// The size of a terminal, in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Its height.
    pub rows: u16,
    /// Its width.
    pub columns: u16,
}

/// Why a message cannot be read or sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Error {
    /// It is longer than messages may be.
    TooLong(usize),
    /// No message has this kind and such a payload.
    Malformed(u8),
    /// A string of it has a zero byte inside.
    Zero,
}

// Written out, because the crate that would derive it is not worth compiling for the guest.
impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong(length) => {
                write!(f, "a message of {length} bytes is too long for the agent (at most {LONGEST})")
            }
            Self::Malformed(kind) => write!(f, "a message of kind {kind:#04x} makes no sense"),
            Self::Zero => f.write_str("a path or an argument has a zero byte inside"),
        }
    }
}

impl std::error::Error for Error {}

const START: u8 = 0x01;
const SIZE: u8 = 0x02;
const SIGNAL: u8 = 0x03;
const READY: u8 = 0x81;
const TOOK: u8 = 0x82;
const EXITED: u8 = 0x83;
const FAILED: u8 = 0x84;

impl Message for ToGuest {
    fn parse(kind: u8, payload: &[u8]) -> Option<Self> {
        match (kind, payload) {
            (START, payload) => Start::parse(payload).map(Self::Start),
            (SIZE, &[row, rows, column, columns]) => Some(Self::Size(Size {
                rows: u16::from_le_bytes([row, rows]),
                columns: u16::from_le_bytes([column, columns]),
            })),
            (SIGNAL, &[signal]) => Some(Self::Signal(signal)),
            _ => None,
        }
    }

    fn write(&self, payload: &mut Vec<u8>) -> Result<u8, Error> {
        match self {
            Self::Start(start) => {
                start.write(payload)?;
                Ok(START)
            }
            Self::Size(Size { rows, columns }) => {
                payload.extend(rows.to_le_bytes());
                payload.extend(columns.to_le_bytes());
                Ok(SIZE)
            }
            Self::Signal(signal) => {
                payload.push(*signal);
                Ok(SIGNAL)
            }
        }
    }
}

impl Message for ToHost {
    fn parse(kind: u8, payload: &[u8]) -> Option<Self> {
        match (kind, payload) {
            (READY, []) => Some(Self::Ready),
            (TOOK, &[signal]) => Some(Self::Took(signal)),
            (EXITED, &[status]) => Some(Self::Exited(status)),
            (FAILED, text) => Some(Self::Failed(String::from_utf8_lossy(text).into_owned())),
            _ => None,
        }
    }

    fn write(&self, payload: &mut Vec<u8>) -> Result<u8, Error> {
        Ok(match self {
            Self::Ready => READY,
            Self::Took(signal) => {
                payload.push(*signal);
                TOOK
            }
            Self::Exited(status) => {
                payload.push(*status);
                EXITED
            }
            Self::Failed(text) => {
                payload.extend_from_slice(text.as_bytes());
                FAILED
            }
        })
    }
}
