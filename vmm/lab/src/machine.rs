//! One run of the lab CPU: a QEMU process that cannot outlive this process, and the channels to the simulated host.

use std::fs::File;
use std::io::{BufRead, BufReader, PipeReader, PipeWriter, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::Duration;

use guest_images::{Arch, child};

use crate::board::{Board, HostPmu};
use crate::cpu::LabCpu;
use crate::error::{Error, Result};

/// Timeout of a request to QEMU's monitor.
const MONITOR_TIMEOUT: Duration = Duration::from_secs(5);

/// Parameters of a machine.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub processors: u32,
    pub memory_mib: u32,
    pub pmu: HostPmu,
}

/// The channels that a machine writes to.
pub struct Output {
    pub stdout: PipeReader,
    pub stderr: PipeReader,
    pub console: PipeReader,
    /// The tar archive of what the script leaves in `$OUT`.
    pub files: PipeReader,
}

/// Result of reading a line from the host's init.
pub enum Received {
    /// A line.
    Line(String),
    /// No whole line came in time.
    Timeout,
    /// The machine has ended.
    End,
}

/// A running machine. It is killed when this is dropped.
pub struct Machine {
    child: Child,
    control: BufReader<UnixStream>,
    monitor: UnixStream,
    board: Board,
    /// Start of a line whose end has not come yet.
    partial_line: String,
}

impl Machine {
    /// Boots `kernel` with an initrd, which may be a file without a name. The machine has a port for input only if
    /// there is one.
    pub fn start(
        cpu: &LabCpu,
        arch: Arch,
        kernel: &Path,
        initrd: &File,
        shape: Shape,
        input: Option<File>,
    ) -> Result<(Self, Output)> {
        let (stdout, stdout_end) = pipe()?;
        let (stderr, stderr_end) = pipe()?;
        let (console, console_end) = pipe()?;
        let (files, files_end) = pipe()?;
        let (control, control_end) = UnixStream::pair().map_err(Error::system("create a socket"))?;
        let (monitor, monitor_end) = UnixStream::pair().map_err(Error::system("create a socket"))?;

        let board = Board::of(arch, shape.pmu);
        let mut command = Command::new(&cpu.program);
        command.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]);
        command.args(["-machine", board.machine, "-cpu", &board.cpu]);
        command.args(["-accel", "tcg", "-icount", "shift=0,sleep=off"]);
        command.args(["-rtc", "base=2026-01-01,clock=vm", "-seed", "1"]);
        command.args(["-smp", &shape.processors.to_string(), "-m", &shape.memory_mib.to_string()]);
        command.arg("-L").arg(&cpu.firmware).args(["-bios", board.firmware]);
        command.arg("-kernel").arg(kernel).arg("-initrd").arg(fd_path(initrd.as_raw_fd()));
        // Without `ioeventfd`, a write of the host reaches its destination at once. With it, another thread of QEMU
        // would do that, at a moment that differs from run to run, and so would the interrupt that follows.
        let ports = if input.is_some() { 6 } else { 5 };
        command.args(["-append", board.command_line]);
        command.arg("-device").arg(format!("virtio-serial-pci,max_ports={ports},ioeventfd=off"));
        for (name, number, end) in
            [("out", 1, &stdout_end), ("err", 2, &stderr_end), ("files", 4, &files_end)]
        {
            command.arg("-chardev").arg(format!("file,id={name},path={}", fd_path(end.as_raw_fd())));
            command.arg("-device").arg(format!("virtserialport,chardev={name},nr={number}"));
        }
        command.arg("-chardev").arg(format!("file,id=console,path={}", fd_path(console_end.as_raw_fd())));
        command.args(["-serial", "chardev:console"]);
        command.arg("-chardev").arg(format!("socket,id=control,fd={}", control_end.as_raw_fd()));
        command.args(["-device", "virtserialport,chardev=control,nr=3"]);
        command.arg("-chardev").arg(format!("socket,id=monitor,fd={}", monitor_end.as_raw_fd()));
        command.args(["-qmp", "chardev:monitor"]);

        let mut ends: Vec<OwnedFd> = vec![
            stdout_end.into(),
            stderr_end.into(),
            console_end.into(),
            files_end.into(),
            control_end.into(),
            monitor_end.into(),
        ];
        if let Some(input) = input {
            let (socket, input_end) = UnixStream::pair().map_err(Error::system("create a socket"))?;
            thread::spawn(|| forward_input(input, socket));
            command.arg("-chardev").arg(format!("socket,id=in,fd={}", input_end.as_raw_fd()));
            command.args(["-device", "virtserialport,chardev=in,nr=5"]);
            ends.push(input_end.into());
        }
        let mut inherited: Vec<RawFd> = ends.iter().map(AsRawFd::as_raw_fd).collect();
        inherited.push(initrd.as_raw_fd());
        child::inherit(&mut command, inherited);
        child::die_with_this_process(&mut command, child::Death::Kill);
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .map_err(Error::file("run", &cpu.program))?;
        drop(ends);
        let machine =
            Self { child, control: BufReader::new(control), monitor, board, partial_line: String::new() };
        Ok((machine, Output { stdout, stderr, console, files }))
    }

    /// Waits for the next line from the host's init.
    pub fn next_line(&mut self, timeout: Duration) -> Received {
        // A socket's timeout must not be zero.
        let timeout = timeout.max(Duration::from_millis(1));
        let set = self.control.get_ref().set_read_timeout(Some(timeout));
        match set.and_then(|()| self.control.read_line(&mut self.partial_line)) {
            Ok(0) => Received::End,
            Ok(_) => Received::Line(std::mem::take(&mut self.partial_line).trim_end().to_owned()),
            Err(_) => Received::Timeout,
        }
    }

    /// Sends a request to the host's init.
    pub fn send(&mut self, request: &str) {
        // If this fails, the host has died, and the caller gets no answer.
        let _ = writeln!(self.control.get_mut(), "{request}");
    }

    /// Asks QEMU's monitor for the address that the first CPU executes.
    pub fn instruction_pointer(&mut self) -> Option<u64> {
        self.monitor.set_read_timeout(Some(MONITOR_TIMEOUT)).ok()?;
        let request = "{\"execute\": \"qmp_capabilities\"}\n{\"execute\": \"human-monitor-command\", \
                       \"arguments\": {\"command-line\": \"info registers\"}}\n";
        self.monitor.write_all(request.as_bytes()).ok()?;
        let mut lines = BufReader::new(&self.monitor).lines().map_while(std::result::Result::ok);
        lines.find_map(|line| self.board.address(&line))
    }

    /// Waits for the end of a machine whose channels are closed. Returns its exit status.
    pub fn wait(mut self) -> Option<ExitStatus> {
        self.child.wait().ok()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Copies the input to the machine until either ends. Nothing waits for this thread, as a read of the input may block
/// for ever.
fn forward_input(mut input: File, mut machine: UnixStream) {
    if std::io::copy(&mut input, &mut machine).is_ok() {
        let _ = machine.shutdown(Shutdown::Write);
        // QEMU discards what it has not read when the socket is closed, so the socket stays open until the machine
        // ends.
        let _ = machine.read(&mut [0]);
    }
}

fn pipe() -> Result<(PipeReader, PipeWriter)> {
    std::io::pipe().map_err(Error::system("create a pipe"))
}

fn fd_path(fd: RawFd) -> String {
    format!("/dev/fd/{fd}")
}
