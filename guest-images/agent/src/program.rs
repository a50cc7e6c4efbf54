//! Starts the command with its streams on pipes or a terminal.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Error, ErrorKind, Result, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};
use std::rc::Rc;

use guest_agent::protocol::Start;

use crate::flow::Flow;
use crate::identity::Identity;
use crate::ports::Ports;
use crate::sys;
use crate::terminal::{self, Terminal};

const PATH: &str = "/bin:/usr/bin:/sbin:/usr/sbin";
/// The default working directory.
const HOME: &str = "/root";

/// The port for reports ([`guest_agent::protocol::REPORT`]).
const REPORT_PORT: &str = "/dev/vport0p5";

/// A shell's statuses for a program that does not exist, or cannot be executed.
const NOT_FOUND: u8 = 127;
const NOT_RUN: u8 = 126;

/// A running program.
pub struct Program {
    /// The first process, which is the session leader.
    pub child: Child,
    /// The process's pidfd, which is readable once the process has ended.
    pub pidfd: OwnedFd,
    /// The terminal that gets the size of the host's terminal.
    pub terminal: Option<Rc<File>>,
    /// Streams to the program.
    pub inputs: Vec<Flow>,
    /// Streams from the program.
    pub outputs: Vec<Flow>,
    /// The slave of the terminal. Kept open so that reads from the master do not fail when the program closes it.
    _slave: Option<File>,
}

/// Result of an attempt to start a command.
pub enum Started {
    Running(Program),
    /// The command cannot be executed. The reason has been written to its standard error.
    Failed {
        status: u8,
        outputs: Vec<Flow>,
    },
}

/// Returns the working directory of a command.
pub fn directory(start: &Start) -> &OsStr {
    start.folder.as_deref().unwrap_or(OsStr::new(HOME))
}

/// Starts the command, as somebody else than root if there is an identity.
pub fn start(start: &Start, identity: Option<&Identity>, ports: &Ports) -> Result<Started> {
    let mut streams = Streams::default();
    let terminal = start.terminals.any().then(|| Terminal::new(start.size)).transpose()?;
    if let Some(terminal) = &terminal {
        streams.inputs.push(Flow::new(&ports.terminal, &terminal.master));
        streams.outputs.push(Flow::new(&terminal.master, &ports.terminal));
    }
    let slave = |is_terminal: bool| terminal.as_ref().filter(|_| is_terminal).map(|terminal| &terminal.slave);
    let stdin = match slave(start.terminals.stdin) {
        Some(slave) => slave.try_clone()?,
        None => streams.input(&ports.stdin)?,
    };
    let stdout = match slave(start.terminals.stdout) {
        Some(slave) => slave.try_clone()?,
        None => streams.output(&ports.stdout)?,
    };
    let mut stderr = match slave(start.terminals.stderr) {
        Some(slave) => slave.try_clone()?,
        None => streams.output(&ports.stderr)?,
    };
    let child_stderr = stderr.try_clone()?;

    let (name, arguments) = start.command.split_first().ok_or_else(|| Error::other("no command"))?;
    let mut command = Command::new(name);
    prepare(&mut command, start, identity);
    if let Some(identity) = identity {
        // What reports to the host is part of the command.
        let _ = std::os::unix::fs::chown(REPORT_PORT, Some(identity.user), None);
        // Programs open their streams by name, too: /dev/stderr.
        for stream in [stdin.as_fd(), stdout.as_fd(), child_stderr.as_fd()] {
            std::os::unix::fs::fchown(stream, Some(identity.user), None)?;
        }
    }
    command.args(arguments).stdin(stdin).stdout(stdout).stderr(child_stderr);
    start_session(&mut command, terminal.as_ref().map(|terminal| terminal.slave.as_raw_fd()));
    if let Some(identity) = identity {
        identity.take_on(&mut command);
    }
    let spawned = command.spawn();
    // `command` owns the command's ends of the pipes, which must be closed here.
    drop(command);
    let Streams { inputs, outputs } = streams;
    match spawned {
        Ok(child) => {
            let (master, slave) = terminal.map(|terminal| (terminal.master, terminal.slave)).unzip();
            let pidfd = pidfd_of(&child)?;
            Ok(Started::Running(Program { child, pidfd, terminal: master, inputs, outputs, _slave: slave }))
        }
        Err(error) => {
            Ok(Started::Failed { status: report_failure(&mut stderr, name, start, &error)?, outputs })
        }
    }
}

/// Starts a shell on the serial console.
pub fn shell(start: &Start) -> Result<Program> {
    let flags = libc::O_NOCTTY | libc::O_NONBLOCK;
    let console = File::options().read(true).write(true).custom_flags(flags).open("/dev/console")?;
    if let Some(size) = start.size {
        sys::set_size(&console, size)?;
    }
    let mut command = Command::new("setsid");
    prepare(&mut command, start, None);
    let child = command.args(["cttyhack", "sh", "-l"]).spawn()?;
    let pidfd = pidfd_of(&child)?;
    let (inputs, outputs) = (Vec::new(), Vec::new());
    Ok(Program { child, pidfd, terminal: Some(Rc::new(console)), inputs, outputs, _slave: None })
}

fn prepare(command: &mut Command, start: &Start, identity: Option<&Identity>) {
    command.current_dir(directory(start));
    let home = identity.map_or(OsStr::new(HOME), |identity| &identity.home);
    command.env("PATH", PATH).env("HOME", home).env("TERM", terminal::kind(start.term.as_deref()));
    command.envs(start.environment.iter().map(|(name, value)| (name, value)));
    // SAFETY: Between fork and exec, this function only makes system calls. It neither allocates nor locks.
    unsafe { command.pre_exec(sys::default_signals) };
}

fn start_session(command: &mut Command, terminal: Option<RawFd>) {
    let become_leader = move || {
        sys::new_session()?;
        terminal.map_or(Ok(()), sys::control_terminal)
    };
    // SAFETY: Between fork and exec, `become_leader` only makes system calls. It neither allocates nor locks.
    unsafe { command.pre_exec(become_leader) };
}

fn pidfd_of(child: &Child) -> Result<OwnedFd> {
    sys::pidfd_open(libc::pid_t::try_from(child.id()).map_err(Error::other)?)
}

/// The pipes of a command.
#[derive(Default)]
struct Streams {
    inputs: Vec<Flow>,
    outputs: Vec<Flow>,
}

impl Streams {
    /// Creates a pipe from a port. Returns the command's end.
    fn input(&mut self, port: &Rc<File>) -> Result<File> {
        let (reader, writer) = io::pipe()?;
        sys::set_nonblocking(&writer)?;
        self.inputs.push(Flow::new(port, &Rc::new(OwnedFd::from(writer).into())));
        Ok(OwnedFd::from(reader).into())
    }

    /// Creates a pipe to a port. Returns the command's end.
    fn output(&mut self, port: &Rc<File>) -> Result<File> {
        let (reader, writer) = io::pipe()?;
        sys::set_nonblocking(&reader)?;
        self.outputs.push(Flow::new(&Rc::new(OwnedFd::from(reader).into()), port));
        Ok(OwnedFd::from(writer).into())
    }
}

/// Writes the reason why a command cannot be executed to its standard error. Returns the command's status.
fn report_failure(stderr: &mut File, name: &OsStr, start: &Start, error: &Error) -> Result<u8> {
    let (status, reason) = match error.kind() {
        // The kernel returns ENOENT both for a missing program and for a missing interpreter.
        ErrorKind::NotFound if is_there(name, start) => {
            (NOT_RUN, "its interpreter or loader is not in the guest".to_owned())
        }
        ErrorKind::NotFound => (NOT_FOUND, "command not found".to_owned()),
        ErrorKind::PermissionDenied => (NOT_RUN, "permission denied".to_owned()),
        _ => (NOT_RUN, error.to_string()),
    };
    let line = [name.as_bytes(), b": ", reason.as_bytes(), b"\n"].concat();
    // Nobody reads the pipe yet. One page (PIPE_BUF) always fits, so the write does not block.
    stderr.write_all(&line[line.len().saturating_sub(4096)..])?;
    Ok(status)
}

/// Returns true if a command's name refers to a file.
fn is_there(name: &OsStr, start: &Start) -> bool {
    let given = start.environment.iter().rev().find(|(name, _)| name == "PATH");
    let path = given.map_or(OsStr::new(PATH), |(_, path)| path);
    let places = if name.as_bytes().contains(&b'/') { OsStr::new("") } else { path };
    let folder = Path::new(directory(start));
    let mut places = places.as_bytes().split(|byte| *byte == b':').map(OsStr::from_bytes);
    places.any(|place| folder.join(place).join(name).is_file())
}
