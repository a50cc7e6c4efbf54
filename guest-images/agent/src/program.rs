//! Starts the command, with its streams on pipes or a terminal.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Error, ErrorKind, Result, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};
use std::rc::Rc;

use guest_agent::protocol::Start;

use crate::flow::Flow;
use crate::ports::Ports;
use crate::sys;
use crate::terminal::{self, Terminal};

/// Where programs are looked for.
const PATH: &str = "/bin:/usr/bin:/sbin:/usr/sbin";
/// Where a command starts that is not told where to.
const HOME: &str = "/root";

/// What a shell would say of a program that does not exist, or cannot be run.
const NOT_FOUND: u8 = 127;
const NOT_RUN: u8 = 126;

/// A program that runs.
pub struct Program {
    /// Its first process, which leads its session.
    pub child: Child,
    /// Can be read when that process has ended.
    pub end: OwnedFd,
    /// The terminal whose size follows that of the host's.
    pub screen: Option<Rc<File>>,
    /// What goes to it.
    pub inputs: Vec<Flow>,
    /// What comes from it.
    pub outputs: Vec<Flow>,
    /// Its side of its terminal, held so that there is always somebody there.
    _slave: Option<File>,
}

/// What came of the attempt to start a command.
pub enum Started {
    Running(Program),
    /// It cannot be run, and the reason is on its way.
    Refused {
        status: u8,
        outputs: Vec<Flow>,
    },
}

/// The folder that a command starts in.
pub fn folder(start: &Start) -> &OsStr {
    start.folder.as_deref().unwrap_or(OsStr::new(HOME))
}

/// Starts the command.
pub fn start(start: &Start, ports: &Ports) -> Result<Started> {
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
    let complaints = stderr.try_clone()?;

    let (name, arguments) = start.command.split_first().ok_or_else(|| Error::other("no command"))?;
    let mut command = Command::new(name);
    prepare(&mut command, start);
    command.args(arguments).stdin(stdin).stdout(stdout).stderr(complaints);
    lead_a_session(&mut command, terminal.as_ref().map(|terminal| terminal.slave.as_raw_fd()));
    let spawned = command.spawn();
    // It has copies of the command's ends of the pipes.
    drop(command);
    let Streams { inputs, outputs } = streams;
    match spawned {
        Ok(child) => {
            let (screen, slave) = terminal.map(|terminal| (terminal.master, terminal.slave)).unzip();
            let end = end_of(&child)?;
            Ok(Started::Running(Program { child, end, screen, inputs, outputs, _slave: slave }))
        }
        Err(error) => {
            Ok(Started::Refused { status: complain(&mut stderr, name, folder(start), &error)?, outputs })
        }
    }
}

/// Starts a shell on the serial console.
pub fn shell(start: &Start) -> Result<Program> {
    let flags = libc::O_NOCTTY | libc::O_NONBLOCK;
    let screen = File::options().read(true).write(true).custom_flags(flags).open("/dev/console")?;
    if let Some(size) = start.size {
        sys::set_size(&screen, size)?;
    }
    let mut command = Command::new("setsid");
    prepare(&mut command, start);
    let child = command.args(["cttyhack", "sh", "-l"]).spawn()?;
    let end = end_of(&child)?;
    let (inputs, outputs) = (Vec::new(), Vec::new());
    Ok(Program { child, end, screen: Some(Rc::new(screen)), inputs, outputs, _slave: None })
}

fn prepare(command: &mut Command, start: &Start) {
    command.current_dir(folder(start));
    command.env("PATH", PATH).env("HOME", HOME).env("TERM", terminal::kind(start.term.as_deref()));
    // SAFETY: between fork and exec, this makes system calls and neither allocates nor locks.
    unsafe { command.pre_exec(sys::default_signals) };
}

fn lead_a_session(command: &mut Command, terminal: Option<RawFd>) {
    let lead = move || {
        sys::new_session()?;
        terminal.map_or(Ok(()), sys::control_terminal)
    };
    // SAFETY: between fork and exec, `lead` makes system calls and neither allocates nor locks.
    unsafe { command.pre_exec(lead) };
}

fn end_of(child: &Child) -> Result<OwnedFd> {
    sys::watch_child(libc::pid_t::try_from(child.id()).map_err(Error::other)?)
}

/// The pipes of a command.
#[derive(Default)]
struct Streams {
    inputs: Vec<Flow>,
    outputs: Vec<Flow>,
}

impl Streams {
    /// The command's end of a pipe from a port.
    fn input(&mut self, port: &Rc<File>) -> Result<File> {
        let (reader, writer) = io::pipe()?;
        sys::do_not_wait(&writer)?;
        self.inputs.push(Flow::new(port, &Rc::new(OwnedFd::from(writer).into())));
        Ok(OwnedFd::from(reader).into())
    }

    /// The command's end of a pipe to a port.
    fn output(&mut self, port: &Rc<File>) -> Result<File> {
        let (reader, writer) = io::pipe()?;
        sys::do_not_wait(&reader)?;
        self.outputs.push(Flow::new(&Rc::new(OwnedFd::from(reader).into()), port));
        Ok(OwnedFd::from(writer).into())
    }
}

/// Says why a command cannot be run, where it would have said something itself.
fn complain(stderr: &mut File, name: &OsStr, folder: &OsStr, error: &Error) -> Result<u8> {
    let (status, reason) = match error.kind() {
        // The kernel says the same of a program and of what it needs to run.
        ErrorKind::NotFound if is_there(name, folder) => {
            (NOT_RUN, "its interpreter or loader is not in the guest".to_owned())
        }
        ErrorKind::NotFound => (NOT_FOUND, "command not found".to_owned()),
        ErrorKind::PermissionDenied => (NOT_RUN, "permission denied".to_owned()),
        _ => (NOT_RUN, error.to_string()),
    };
    let line = [name.as_bytes(), b": ", reason.as_bytes(), b"\n"].concat();
    // A pipe takes no more than this at once while nobody reads it.
    stderr.write_all(&line[line.len().saturating_sub(4096)..])?;
    Ok(status)
}

/// Whether there is a program of that name, as one that is started in this folder.
fn is_there(name: &OsStr, folder: &OsStr) -> bool {
    let places = if name.as_bytes().contains(&b'/') { "" } else { PATH };
    places.split(':').any(|place| Path::new(folder).join(place).join(name).is_file())
}
