//! The message that starts a command in the guest.
//!
//! The payload is a list of NUL-terminated strings: `KEY=VALUE` for each setting, then `--`, then the command and its
//! arguments. A share is two strings: `ro=TAG` or `rw=TAG`, and its path. No byte of a path or an argument needs to be
//! escaped.

use std::ffi::{OsStr, OsString};
use std::fmt::Write;
use std::net::Ipv4Addr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::time::Duration;

use super::{Error, Size};

/// The command and its settings.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Start {
    /// Tag of the directory of the host that becomes the root, if it does.
    pub root: Option<OsString>,
    /// Directories of the host to mount before the command starts.
    pub shares: Vec<Share>,
    /// The network to set up before the command starts.
    pub network: Option<Network>,
    /// Working directory. The default is root's home directory.
    pub folder: Option<OsString>,
    /// The streams that are a terminal.
    pub terminals: Terminals,
    /// Size of the terminal, if known.
    pub size: Option<Size>,
    /// Type of the terminal, the value of `TERM`.
    pub term: Option<OsString>,
    /// Whom the command runs as: a name or a number, and perhaps a group's after a colon. The default is root.
    pub user: Option<OsString>,
    /// Variables of the environment, beside those that each command has, or instead of them.
    pub environment: Vec<Variable>,
    /// What the guest has to make up for, if it was saved before and restored now.
    pub restored: Option<Restored>,
    /// The program and its arguments. If empty, the agent runs a shell on the serial console, and powers off when it
    /// exits.
    pub command: Vec<OsString>,
}

/// What a guest has to make up for that was restored. Others were restored from the same state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Restored {
    /// Time since 1970.
    pub time: Duration,
    /// Random bytes.
    pub entropy: Entropy,
}

/// A variable's name and its value.
pub type Variable = (OsString, OsString);

/// Random bytes from the host.
pub type Entropy = [u8; 32];

/// The guest's network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    /// The Ethernet address. The device has another one if the guest was restored.
    pub address: [u8; 6],
    /// The name server, if it is not that of the DHCP server.
    pub name_server: Option<Ipv4Addr>,
}

/// A shared directory of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    /// Tag of the virtio file system device.
    pub tag: OsString,
    /// Mount point.
    pub path: OsString,
    pub access: Access,
}

/// The guest's access to a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// The guest can only read.
    ReadOnly,
    /// The guest can read and write, with the permissions of the user who runs Tally.
    ReadWrite,
}

/// The streams of the command that are its terminal. The others are pipes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Terminals {
    pub stdin: bool,
    pub stdout: bool,
    pub stderr: bool,
}

impl Terminals {
    /// Returns true if at least one stream is a terminal.
    pub fn any(self) -> bool {
        self.stdin || self.stdout || self.stderr
    }
}

const READ_ONLY: &[u8] = b"ro";
const READ_WRITE: &[u8] = b"rw";
const ROOT: &[u8] = b"root";
const USER: &[u8] = b"user";
const VARIABLE: &[u8] = b"env";
const NETWORK: &[u8] = b"network";
const NAME_SERVER: &[u8] = b"name-server";
const FOLDER: &[u8] = b"folder";
const TERMINAL: &[u8] = b"terminal";
const STDIN: &[u8] = b"stdin";
const STDOUT: &[u8] = b"stdout";
const STDERR: &[u8] = b"stderr";
const SIZE: &[u8] = b"size";
const TERM: &[u8] = b"term";
const TIME: &[u8] = b"time";
const ENTROPY: &[u8] = b"entropy";
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
            match setting(string)? {
                (key @ (READ_ONLY | READ_WRITE), tag) => start.shares.push(Share {
                    tag: owned(tag),
                    path: owned(strings.next()?),
                    access: if key == READ_ONLY { Access::ReadOnly } else { Access::ReadWrite },
                }),
                (ROOT, tag) => start.root = Some(owned(tag)),
                (USER, name) => start.user = Some(owned(name)),
                (VARIABLE, variable) => {
                    let (name, value) = setting(variable)?;
                    start.environment.push((owned(name), owned(value)));
                }
                (NETWORK, address) => {
                    let address = parse_hex(address)?;
                    start.network = Some(Network { address, name_server: None });
                }
                (NAME_SERVER, server) => {
                    start.network.as_mut()?.name_server =
                        Some(OsStr::from_bytes(server).to_str()?.parse().ok()?);
                }
                (FOLDER, path) => start.folder = Some(owned(path)),
                (TERMINAL, STDIN) => start.terminals.stdin = true,
                (TERMINAL, STDOUT) => start.terminals.stdout = true,
                (TERMINAL, STDERR) => start.terminals.stderr = true,
                (SIZE, size) => start.size = Some(parse_size(size)?),
                (TERM, name) => start.term = Some(owned(name)),
                (TIME, time) => start.restored = Some(Restored::of_strings(time, strings.next()?)?),
                _ => return None,
            }
        }
        start.command = strings.map(owned).collect();
        Some(start)
    }

    pub(super) fn write(&self, payload: &mut Vec<u8>) -> Result<(), Error> {
        let mut strings = Strings(payload);
        if let Some(tag) = &self.root {
            strings.setting(ROOT, tag.as_bytes())?;
        }
        for share in &self.shares {
            let key = match share.access {
                Access::ReadOnly => READ_ONLY,
                Access::ReadWrite => READ_WRITE,
            };
            strings.setting(key, share.tag.as_bytes())?;
            strings.push(&[share.path.as_bytes()])?;
        }
        if let Some(Network { address, name_server }) = self.network {
            strings.setting(NETWORK, hex(&address).as_bytes())?;
            if let Some(server) = name_server {
                strings.setting(NAME_SERVER, server.to_string().as_bytes())?;
            }
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
        if let Some(user) = &self.user {
            strings.setting(USER, user.as_bytes())?;
        }
        for (name, value) in &self.environment {
            strings.push(&[VARIABLE, b"=", name.as_bytes(), b"=", value.as_bytes()])?;
        }
        if let Some(restored) = &self.restored {
            restored.put(&mut strings)?;
        }
        strings.push(&[COMMAND])?;
        self.command.iter().try_for_each(|argument| strings.push(&[argument.as_bytes()]))
    }
}

impl Restored {
    /// Reads a payload of its two strings.
    pub(super) fn parse(payload: &[u8]) -> Option<Self> {
        let mut strings = payload.strip_suffix(&[0])?.split(|&byte| byte == 0);
        let (TIME, time) = setting(strings.next()?)? else { return None };
        let restored = Self::of_strings(time, strings.next()?)?;
        strings.next().is_none().then_some(restored)
    }

    pub(super) fn write(&self, payload: &mut Vec<u8>) -> Result<(), Error> {
        self.put(&mut Strings(payload))
    }

    /// Reads the value of the first string, and the second string.
    fn of_strings(time: &[u8], second: &[u8]) -> Option<Self> {
        let (ENTROPY, entropy) = setting(second)? else { return None };
        Some(Self { time: parse_time(time)?, entropy: parse_hex(entropy)? })
    }

    fn put(&self, strings: &mut Strings) -> Result<(), Error> {
        let Self { time, entropy } = self;
        strings.setting(TIME, format!("{}.{:09}", time.as_secs(), time.subsec_nanos()).as_bytes())?;
        strings.setting(ENTROPY, hex(entropy).as_bytes())
    }
}

/// A list of NUL-terminated strings.
struct Strings<'a>(&'a mut Vec<u8>);

impl Strings<'_> {
    fn setting(&mut self, key: &[u8], value: &[u8]) -> Result<(), Error> {
        self.push(&[key, b"=", value])
    }

    fn push(&mut self, parts: &[&[u8]]) -> Result<(), Error> {
        for part in parts {
            if part.contains(&0) {
                return Err(Error::Nul);
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

/// Splits a setting into its key and its value.
fn setting(string: &[u8]) -> Option<(&[u8], &[u8])> {
    let equals = string.iter().position(|&byte| byte == b'=')?;
    Some((&string[..equals], &string[equals + 1..]))
}

fn parse_time(text: &[u8]) -> Option<Duration> {
    let (seconds, nanoseconds) = OsStr::from_bytes(text).to_str()?.split_once('.')?;
    let nanoseconds = nanoseconds.parse().ok().filter(|nanoseconds| *nanoseconds < 1_000_000_000)?;
    Some(Duration::new(seconds.parse().ok()?, nanoseconds))
}

fn hex(bytes: &[u8]) -> String {
    let mut text = String::new();
    for byte in bytes {
        let _ = write!(text, "{byte:02x}");
    }
    text
}

fn parse_hex<const LENGTH: usize>(text: &[u8]) -> Option<[u8; LENGTH]> {
    let mut bytes = [0; LENGTH];
    let digits = OsStr::from_bytes(text).to_str().filter(|text| text.len() == 2 * LENGTH)?;
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(digits.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(bytes)
}

fn parse_size(text: &[u8]) -> Option<Size> {
    let (rows, columns) = OsStr::from_bytes(text).to_str()?.split_once('x')?;
    Some(Size { rows: rows.parse().ok()?, columns: columns.parse().ok()? })
}
