//! The messages on the control port, and the numbers of the ports.
//!
//! A message is a frame: its kind in one byte, the length of its payload in four bytes (little-endian), and the
//! payload. The guest may be hostile, so neither side trusts the other. A payload that is longer than [`MAX_PAYLOAD`],
//! or a message that is not valid, gives an [`Error`]. The length of a frame never determines the size of an
//! allocation.

mod frame;
mod start;
#[cfg(test)]
mod tests;

use std::fmt;

pub use frame::{Decoder, MAX_PAYLOAD, Message};
pub use start::{Access, Entropy, Network, Restored, Share, Start, Terminals, Variable};

/// Directories at the top of a root that the guest has for itself, whatever the host has there.
pub const OWN_FOLDERS: [&str; 5] = ["dev", "proc", "run", "sys", "tmp"];

/// Port for messages in both directions.
pub const CONTROL: u32 = 0;
/// Port of the command's standard input, unless that is a terminal.
pub const STDIN: u32 = 1;
/// Port of the command's standard output, unless that is a terminal.
pub const STDOUT: u32 = 2;
/// Port of the command's standard error, unless that is a terminal.
pub const STDERR: u32 = 3;
/// Port of the command's terminal, in both directions.
pub const TERMINAL: u32 = 4;
/// Port to which scripts in the guest write reports for the host. The agent does not use it.
pub const REPORT: u32 = 5;

/// A message from the host to the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToGuest {
    /// Runs a command. This is always the first message, and it is sent only once.
    Start(Start),
    /// Changes the size of the terminal.
    Size(Size),
    /// Sends this signal to the command.
    Signal(u8),
    /// The guest was saved while its command ran, and has been restored.
    Restored(Restored),
}

/// A message from the agent to the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToHost {
    /// The agent waits for [`ToGuest::Start`].
    Ready,
    /// This signal has been sent to the command.
    SignalSent(u8),
    /// The command has ended with this status. All its output has been written to the ports.
    Exited(u8),
    /// The command could not be run, for this reason. The text is one line for the user.
    Failed(String),
}

/// The size of a terminal, in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Height.
    pub rows: u16,
    /// Width.
    pub columns: u16,
}

/// Error while a message is encoded or decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Error {
    /// The payload has this length, which is more than [`MAX_PAYLOAD`].
    TooLong(usize),
    /// There is no message of this kind, or its payload is not valid.
    Malformed(u8),
    /// A string contains a NUL byte.
    Nul,
}

// Implemented by hand, because `thiserror` is not worth compiling for the guest.
impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong(length) => {
                write!(f, "a message of {length} bytes is too long for the agent (at most {MAX_PAYLOAD})")
            }
            Self::Malformed(kind) => write!(f, "a message of kind {kind:#04x} is invalid"),
            Self::Nul => f.write_str("a path or an argument contains a NUL byte"),
        }
    }
}

impl std::error::Error for Error {}

const START: u8 = 0x01;
const SIZE: u8 = 0x02;
const SIGNAL: u8 = 0x03;
const RESTORED: u8 = 0x04;
const READY: u8 = 0x81;
const SIGNAL_SENT: u8 = 0x82;
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
            (RESTORED, payload) => Restored::parse(payload).map(Self::Restored),
            _ => None,
        }
    }

    fn write(&self, payload: &mut Vec<u8>) -> Result<u8, Error> {
        match self {
            Self::Restored(restored) => {
                restored.write(payload)?;
                Ok(RESTORED)
            }
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
            (SIGNAL_SENT, &[signal]) => Some(Self::SignalSent(signal)),
            (EXITED, &[status]) => Some(Self::Exited(status)),
            (FAILED, text) => Some(Self::Failed(String::from_utf8_lossy(text).into_owned())),
            _ => None,
        }
    }

    fn write(&self, payload: &mut Vec<u8>) -> Result<u8, Error> {
        Ok(match self {
            Self::Ready => READY,
            Self::SignalSent(signal) => {
                payload.push(*signal);
                SIGNAL_SENT
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
