//! One run of the lab CPU: a QEMU process that cannot outlive this one, and the channels to the host that it simulates.

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
use crate::{Error, Result};

/// How long the monitor has to answer when the host hangs.
const MONITOR_PATIENCE: Duration = Duration::from_secs(5);

/// What can differ between machines.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub processors: u32,
    pub memory_mib: u32,
    pub pmu: HostPmu,
}

/// What a machine writes, to be read by whoever runs it.
pub struct Output {
    pub stdout: PipeReader,
    pub stderr: PipeReader,
    pub console: PipeReader,
    pub files: PipeReader,
}

/// What came from a machine while it was listened to.
pub enum Heard {
    Line(String),
    /// Nothing in time.
    Nothing,
    /// The machine has ended.
    End,
}

/// A running machine. It is killed when this is dropped.
pub struct Machine {
    child: Child,
    control: BufReader<UnixStream>,
    monitor: UnixStream,
    board: Board,
    /// What has come of a line whose end has not.
    begun_line: String,
}

impl Machine {
    /// Boots `kernel` with an initrd that needs no name. Only a machine that is given an input has a port for it.
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
        // Without `ioeventfd` what is written leaves the machine at once, and not when another thread gets to it: that
        // moment, and the interrupt that follows, would be different every time.
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
            let (here, there) = UnixStream::pair().map_err(Error::system("create a socket"))?;
            thread::spawn(|| pass_in(input, here));
            command.arg("-chardev").arg(format!("socket,id=in,fd={}", there.as_raw_fd()));
            command.args(["-device", "virtserialport,chardev=in,nr=5"]);
            ends.push(there.into());
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
            Self { child, control: BufReader::new(control), monitor, board, begun_line: String::new() };
        Ok((machine, Output { stdout, stderr, console, files }))
    }

    /// The next line from the host's init.
    pub fn next_line(&mut self, patience: Duration) -> Heard {
        // A timeout of zero would mean none.
        let patience = patience.max(Duration::from_millis(1));
        let heard = self.control.get_ref().set_read_timeout(Some(patience));
        match heard.and_then(|()| self.control.read_line(&mut self.begun_line)) {
            Ok(0) => Heard::End,
            Ok(_) => Heard::Line(std::mem::take(&mut self.begun_line).trim_end().to_owned()),
            Err(_) => Heard::Nothing,
        }
    }

    /// Asks the host's init something.
    pub fn ask(&mut self, question: &str) {
        // A host that has died answers nothing, which the caller finds out.
        let _ = writeln!(self.control.get_mut(), "{question}");
    }

    /// The address that the first processor executes, seen from outside.
    pub fn instruction_pointer(&mut self) -> Option<u64> {
        self.monitor.set_read_timeout(Some(MONITOR_PATIENCE)).ok()?;
        let request = "{\"execute\": \"qmp_capabilities\"}\n{\"execute\": \"human-monitor-command\", \
                       \"arguments\": {\"command-line\": \"info registers\"}}\n";
        self.monitor.write_all(request.as_bytes()).ok()?;
        let mut lines = BufReader::new(&self.monitor).lines().map_while(std::result::Result::ok);
        lines.find_map(|line| self.board.address(&line))
    }

    /// Waits for a machine whose channels are closed, and says how it ended.
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

/// Passes an input on as fast as it is read, to its end or the machine's. Nobody waits for this: an input may be silent
/// for ever.
fn pass_in(mut input: File, mut machine: UnixStream) {
    if std::io::copy(&mut input, &mut machine).is_ok() {
        let _ = machine.shutdown(Shutdown::Write);
        // Were it closed now, the machine would throw away what it has not read yet.
        let _ = machine.read(&mut [0]);
    }
}

fn pipe() -> Result<(PipeReader, PipeWriter)> {
    std::io::pipe().map_err(Error::system("create a pipe"))
}

fn fd_path(fd: RawFd) -> String {
    format!("/dev/fd/{fd}")
}
