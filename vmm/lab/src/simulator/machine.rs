//! One run of the lab CPU: a simulator's process that cannot outlive this process, and the channels to the simulated
//! host.

mod bochs;
mod qemu;
mod saved;

use std::fs::File;
use std::io::{BufRead, BufReader, PipeReader, PipeWriter, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, ExitStatus, Stdio};
use std::thread;
use std::time::Duration;

use guest_images::{Arch, child};

use crate::error::{Error, Result};
use crate::simulator::board::{HostPmu, Processor};
use crate::simulator::cpu::LabCpu;
use crate::simulator::silicon::Silicon;
use qemu::Monitor;

pub use saved::{HostParts, SavedHost};

/// Timeout of the simulated host's boot, in real time. It is long enough for a machine that is busy with other work
/// too.
pub const BOOT_LIMIT: Duration = Duration::from_mins(2);
/// Timeout of a request to the simulator's monitor.
const MONITOR_TIMEOUT: Duration = Duration::from_secs(30);

/// Parameters of a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    pub processors: u32,
    pub memory_mib: u32,
    pub pmu: HostPmu,
    pub silicon: Silicon,
}

impl Default for Shape {
    fn default() -> Self {
        Self { processors: 1, memory_mib: 2048, pmu: HostPmu::default(), silicon: Silicon::default() }
    }
}

/// How a host starts.
pub enum Start<'a> {
    /// It boots with this initrd, which may be a file without a name.
    Boot { initrd: &'a File },
    /// It boots with this initrd, with its memory in this file, until it stops itself.
    ToSave { initrd: &'a Path, memory: &'a Path },
    /// It goes on from where it was saved, and finds its files in an archive of [`SavedHost::FILES_SIZE`] bytes.
    Saved { host: &'a SavedHost, files: &'a File },
    /// It does that with its memory in this file, a copy of the saved one, until it stops itself again.
    ToSaveAgain { host: &'a SavedHost, files: &'a File, memory: &'a Path },
}

/// The channels that a machine writes to.
pub struct Output {
    pub stdout: PipeReader,
    pub stderr: PipeReader,
    pub console: PipeReader,
    /// The tar archive of what the script leaves in `$OUT`.
    pub files: PipeReader,
}

/// The simulator's ends of the channels, which it inherits.
struct Channels {
    stdout: RawFd,
    stderr: RawFd,
    console: RawFd,
    files: RawFd,
    control: RawFd,
    monitor: RawFd,
    /// Exists only if there is input.
    input: Option<RawFd>,
    /// For the log of what is executed, if that is wanted.
    trace: Option<RawFd>,
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
    processor: Processor,
    /// Start of a line whose end has not come yet.
    partial_line: String,
}

impl Machine {
    /// Starts a host with this kernel. A machine that boots has a port for input only if there is one. On QEMU, what is
    /// executed while [`Tracer::set`] is on is logged to `trace`.
    pub fn start(
        cpu: &LabCpu,
        arch: Arch,
        kernel: &Path,
        start: &Start,
        shape: Shape,
        input: Option<File>,
        trace: Option<PipeWriter>,
    ) -> Result<(Self, Output)> {
        let (stdout, stdout_end) = pipe()?;
        let (stderr, stderr_end) = pipe()?;
        let (console, console_end) = pipe()?;
        let (files, files_end) = pipe()?;
        let (control, control_end) = UnixStream::pair().map_err(Error::system("create a socket"))?;
        let (monitor, monitor_end) = UnixStream::pair().map_err(Error::system("create a socket"))?;

        let mut ends: Vec<OwnedFd> = Vec::new();
        let mut keep = |end: OwnedFd| {
            let descriptor = end.as_raw_fd();
            ends.push(end);
            descriptor
        };
        let channels = Channels {
            stdout: keep(stdout_end.into()),
            stderr: keep(stderr_end.into()),
            console: keep(console_end.into()),
            files: keep(files_end.into()),
            control: keep(control_end.into()),
            monitor: keep(monitor_end.into()),
            input: match input {
                None => None,
                Some(input) => {
                    let (socket, input_end) = UnixStream::pair().map_err(Error::system("create a socket"))?;
                    thread::spawn(|| forward_input(input, socket));
                    Some(keep(input_end.into()))
                }
            },
            trace: trace.map(|trace| keep(trace.into())),
        };
        let processor = Processor::of(arch, shape.pmu);
        let (mut command, images) = match (processor, start) {
            (Processor::Intel, Start::Boot { initrd }) => {
                bochs::command(cpu, kernel, initrd, shape, &channels)?
            }
            _ => (qemu::command(cpu, processor, kernel, start, shape, &channels), Vec::new()),
        };
        ends.extend(images.into_iter().map(OwnedFd::from));
        let mut inherited: Vec<RawFd> = ends.iter().map(AsRawFd::as_raw_fd).collect();
        match start {
            Start::Boot { initrd } => inherited.push(initrd.as_raw_fd()),
            Start::ToSave { .. } => {}
            Start::Saved { files, .. } | Start::ToSaveAgain { files, .. } => {
                inherited.push(files.as_raw_fd());
            }
        }
        child::inherit(&mut command, inherited);
        child::die_with_this_process(&mut command, child::Death::Kill);
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .map_err(Error::file("run", &cpu.program))?;
        drop(ends);
        let control = BufReader::new(control);
        let machine = Self { child, control, monitor, processor, partial_line: String::new() };
        let mut monitor = Monitor::new(&machine.monitor, BOOT_LIMIT);
        match start {
            Start::Boot { .. } => Ok(()),
            Start::ToSave { .. } => monitor.begin(),
            Start::Saved { host, .. } | Start::ToSaveAgain { host, .. } => {
                monitor.begin().and_then(|()| monitor.load(&host.state()))
            }
        }
        .map_err(Error::system("start a simulated host"))?;
        Ok((machine, Output { stdout, stderr, console, files }))
    }

    /// Waits until a host has stopped itself, and saves all but its memory in a file. The machine ends.
    fn save(self, state: &Path, limit: Duration) -> Result<()> {
        Monitor::new(&self.monitor, limit).save(state).map_err(Error::system("save a simulated host"))?;
        // The file is complete when the machine has ended.
        self.wait();
        Ok(())
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

    /// Asks the simulator's monitor for the address that the first CPU executes.
    pub fn instruction_pointer(&mut self) -> Option<u64> {
        let (request, prefix) = match self.processor {
            Processor::Amd => (qemu::REGISTERS, "RIP="),
            Processor::Riscv64 => (qemu::REGISTERS, " pc "),
            Processor::Intel => (bochs::REGISTERS, "RIP="),
        };
        self.monitor.set_read_timeout(Some(MONITOR_TIMEOUT)).ok()?;
        self.monitor.write_all(request.as_bytes()).ok()?;
        let mut lines = BufReader::new(&self.monitor).lines().map_while(std::result::Result::ok);
        lines.find_map(|line| address_after(prefix, &line))
    }

    /// Returns the switch of the log of what is executed.
    pub fn tracer(&self) -> Result<Tracer> {
        self.monitor.try_clone().map(Tracer).map_err(Error::system("reach the simulator's monitor"))
    }

    /// Returns the time for which the simulator has run on processors, or `None` if that is not known.
    pub fn processor_time(&self) -> Option<Duration> {
        child::processor_time(&self.child).ok()
    }

    /// Waits for the end of a machine whose channels are closed. Returns its exit status.
    pub fn wait(mut self) -> Option<ExitStatus> {
        self.child.wait().ok()
    }
}

/// The switch of the log of what a machine executes.
pub struct Tracer(UnixStream);

impl Tracer {
    /// Begins or ends the log.
    pub fn set(&self, is_on: bool) -> Result<()> {
        let mut monitor = Monitor::new(&self.0, MONITOR_TIMEOUT);
        monitor.set_trace(is_on).map_err(Error::system("trace a simulated host"))
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

/// Creates a pipe.
pub fn pipe() -> Result<(PipeReader, PipeWriter)> {
    std::io::pipe().map_err(Error::system("create a pipe"))
}

/// Returns the address after this text in a line of a monitor's output.
fn address_after(prefix: &str, line: &str) -> Option<u64> {
    let (_, rest) = line.split_once(prefix)?;
    u64::from_str_radix(rest.trim_start().get(..16)?, 16).ok()
}

fn fd_path(fd: RawFd) -> String {
    format!("/dev/fd/{fd}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_instruction_pointer_is_found_in_the_monitors_output() {
        let x86 = "RIP=ffffffff810a0b1c RFL=00000246 [---Z-P-] CPL=0 II=0 A20=1 SMM=0 HLT=1\\r\\n";
        assert_eq!(address_after("RIP=", x86), Some(0xffff_ffff_810a_0b1c));
        let riscv = " pc       ffffffff80b9e0f4\\r\\n mhartid  0000000000000000\\r\\n";
        assert_eq!(address_after(" pc ", riscv), Some(0xffff_ffff_80b9_e0f4));
        assert_eq!(address_after(" pc ", " mepc     ffffffff80b9e0f4"), None);
    }
}
