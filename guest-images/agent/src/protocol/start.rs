//! What to run in the guest.
//!
//! Its payload is a list of strings that end with a zero byte: `KEY=VALUE` for each setting, then `--`, then the command
//! and its arguments. A share is two strings, `ro=TAG` or `rw=TAG` and its path. So every byte that a path or an argument
//! can hold stands for itself.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use super::{Error, Size};

/// The settings of a command.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Start {
    /// Folders of the host to mount first.
    pub shares: Vec<Share>,
    /// The folder to start in, if it is not root's home.
    pub folder: Option<OsString>,
    /// Which streams are a terminal.
    pub terminals: Terminals,
    /// The terminal's size, if that is known.
    pub size: Option<Size>,
    /// The terminal's kind, as in `TERM`.
    pub term: Option<OsString>,
    /// The program and its arguments. Empty: a shell on the serial console, and the machine ends with it.
    pub command: Vec<OsString>,
}

/// A folder of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    /// The tag of its device.
    pub tag: OsString,
    /// Where it is mounted.
    pub path: OsString,
    /// What the guest may do to it.
    pub access: Access,
}

/// What the guest may do to a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Nothing but read it.
    ReadOnly,
    /// All that Tally itself may.
    ReadWrite,
}

/// Which streams of the command are a terminal, the same one for all of them. The others are pipes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Terminals {
    /// What it reads.
    pub stdin: bool,
    /// What it writes.
    pub stdout: bool,
    /// Its errors.
    pub stderr: bool,
}

impl Terminals {
    /// Whether there is a terminal at all.
    pub fn any(self) -> bool {
        self.stdin || self.stdout || self.stderr
    }
}

const READ_ONLY: &[u8] = b"ro";
const READ_WRITE: &[u8] = b"rw";
const FOLDER: &[u8] = b"folder";
const TERMINAL: &[u8] = b"terminal";
const STDIN: &[u8] = b"stdin";
const STDOUT: &[u8] = b"stdout";
const STDERR: &[u8] = b"stderr";
const SIZE: &[u8] = b"size";
const TERM: &[u8] = b"term";
const COMMAND: &[u8] = b"--";

impl Start {
    pub(super) fn parse(payload: &[u8]) -> Option<Self> {
        let mut start = Self::default();
        let mut strings = payload.strip_suffix(&[0])?.split(|&byte| byte == 0);
        loop {
            let string = strings.next()?;
            if string == COMMAND {
                break;
            }
            let equals = string.iter().position(|&byte| byte == b'=')?;
            let (key, value) = (&string[..equals], &string[equals + 1..]);
            match (key, value) {
                (READ_ONLY | READ_WRITE, tag) => start.shares.push(Share {
                    tag: owned(tag),
                    path: owned(strings.next()?),
                    access: if key == READ_ONLY { Access::ReadOnly } else { Access::ReadWrite },
                }),
                (FOLDER, path) => start.folder = Some(owned(path)),
                (TERMINAL, STDIN) => start.terminals.stdin = true,
                (TERMINAL, STDOUT) => start.terminals.stdout = true,
                (TERMINAL, STDERR) => start.terminals.stderr = true,
                (SIZE, size) => start.size = Some(parse_size(size)?),
                (TERM, name) => start.term = Some(owned(name)),
                _ => return None,
            }
        }
        start.command = strings.map(owned).collect();
        Some(start)
    }

    pub(super) fn write(&self, payload: &mut Vec<u8>) -> Result<(), Error> {
        let mut strings = Strings(payload);
        for share in &self.shares {
            let key = match share.access {
                Access::ReadOnly => READ_ONLY,
                Access::ReadWrite => READ_WRITE,
            };
            strings.setting(key, share.tag.as_bytes())?;
            strings.push(&[share.path.as_bytes()])?;
        }
        if let Some(folder) = &self.folder {
            strings.setting(FOLDER, folder.as_bytes())?;
        }
        let Terminals { stdin, stdout, stderr } = self.terminals;
        for (stream, is_terminal) in [(STDIN, stdin), (STDOUT, stdout), (STDERR, stderr)] {
            if is_terminal {
                strings.setting(TERMINAL, stream)?;
            }
        }
        if let Some(Size { rows, columns }) = self.size {
            strings.setting(SIZE, format!("{rows}x{columns}").as_bytes())?;
        }
        if let Some(term) = &self.term {
            strings.setting(TERM, term.as_bytes())?;
        }
        strings.push(&[COMMAND])?;
        self.command.iter().try_for_each(|argument| strings.push(&[argument.as_bytes()]))
    }
}

/// A list of strings that end with a zero byte.
struct Strings<'a>(&'a mut Vec<u8>);

impl Strings<'_> {
    fn setting(&mut self, key: &[u8], value: &[u8]) -> Result<(), Error> {
        self.push(&[key, b"=", value])
    }

    fn push(&mut self, parts: &[&[u8]]) -> Result<(), Error> {
        for part in parts {
            if part.contains(&0) {
                return Err(Error::Zero);
            }
            self.0.extend_from_slice(part);
        }
        self.0.push(0);
        Ok(())
    }
}

fn owned(bytes: &[u8]) -> OsString {
    OsString::from_vec(bytes.to_vec())
}

fn parse_size(text: &[u8]) -> Option<Size> {
    let (rows, columns) = OsStr::from_bytes(text).to_str()?.split_once('x')?;
    Some(Size { rows: rows.parse().ok()?, columns: columns.parse().ok()? })
}
