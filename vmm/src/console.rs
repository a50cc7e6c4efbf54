//! What the serial port sends on its way out: bytes gathered into lines, and nothing that waits where it must not.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};

/// How long a byte may wait for the rest of its line.
const PATIENCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
/// No time at all.
const ZERO: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
/// How much waits at most.
const LONGEST: usize = 4096;
/// How much of a hidden console is kept, to be shown should the guest die.
const TAIL: usize = 8192;
/// How much of that is shown: what a kernel prints when it panics, from its first line on.
const LAST_LINES: usize = 60;

/// Goes off when bytes have waited long enough.
pub struct FlushTimer {
    fd: OwnedFd,
    /// Set while it runs, so that an output that is always busy does not put off its turn.
    armed: AtomicBool,
}

impl FlushTimer {
    /// A timer that does not run.
    pub fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let fd = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        Ok(Self { fd, armed: AtomicBool::new(false) })
    }

    /// Starts it, unless it runs.
    pub fn arm(&self) {
        let once = Itimerspec { it_interval: ZERO, it_value: PATIENCE };
        if !self.armed.swap(true, Ordering::AcqRel)
            && timerfd_settime(&self.fd, TimerfdTimerFlags::empty(), &once).is_err()
        {
            // Without a timer the bytes wait for their line's end.
            self.armed.store(false, Ordering::Release);
        }
    }

    /// Takes note that it went off.
    pub fn acknowledge(&self) {
        self.armed.store(false, Ordering::Release);
        // Non-blocking: an error says that it has been started again meanwhile.
        let _ = rustix::io::read(&self.fd, &mut [0; 8]);
    }
}

impl AsRawFd for FlushTimer {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

struct Buffer {
    waiting: Vec<u8>,
    file: Option<File>,
    tail: Option<VecDeque<u8>>,
    timer: Arc<FlushTimer>,
}

/// Where the serial port's output goes. A clone is the same place.
#[derive(Clone)]
pub struct Output(Arc<Mutex<Buffer>>);

impl Output {
    /// Output into a file, if there is one; `timer` is armed whenever bytes wait, and whoever sees it fire calls
    /// [`Output::try_flush`].
    pub fn new(file: Option<File>, timer: Arc<FlushTimer>) -> Self {
        Self(Arc::new(Mutex::new(Buffer { waiting: Vec::new(), file, tail: None, timer })))
    }

    /// Keeps the last of the output, for [`Output::tail`].
    pub fn keep_tail(&self) {
        self.buffer().tail = Some(VecDeque::with_capacity(TAIL));
    }

    /// Writes out what waits, but never waits itself: a reader that takes nothing may stop a vCPU that prints, and must
    /// not stop whoever would end the machine. Says whether it could.
    pub fn try_flush(&self) -> bool {
        let mut buffer = match self.0.try_lock() {
            Ok(buffer) => buffer,
            Err(TryLockError::Poisoned(error)) => error.into_inner(),
            Err(TryLockError::WouldBlock) => return false,
        };
        if !buffer.has_room() {
            return false;
        }
        buffer.write_out();
        true
    }

    /// Writes out what waits, however long that takes.
    pub fn flush_all(&self) {
        self.buffer().write_out();
    }

    /// The last lines of the output.
    pub fn tail(&self) -> String {
        let mut buffer = self.buffer();
        buffer.write_out();
        let bytes: Vec<u8> = buffer.tail.iter().flatten().copied().collect();
        // What a guest says must do nothing to the terminal that it is shown on.
        let is_text = |c: &char| !c.is_control() || matches!(c, '\n' | '\t');
        let text: String = String::from_utf8_lossy(&bytes).chars().filter(is_text).collect();
        let lines: Vec<&str> = text.trim_end().lines().collect();
        lines[lines.len().saturating_sub(LAST_LINES)..].join("\n")
    }

    fn buffer(&self) -> MutexGuard<'_, Buffer> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Buffer {
    fn write_out(&mut self) {
        if let Some(tail) = &mut self.tail {
            tail.extend(&self.waiting);
            let excess = tail.len().saturating_sub(TAIL);
            tail.drain(..excess);
        }
        if let Some(file) = &mut self.file {
            // A console that nobody sees any more goes on for itself.
            let _ = write_all(file, &self.waiting);
        }
        self.waiting.clear();
    }

    /// Whether the file would take what waits; a pipe that can be written to takes as much as ever waits.
    fn has_room(&self) -> bool {
        self.file.as_ref().is_none_or(has_room)
    }
}

/// Writes everything, also where somebody made the file non-blocking.
fn write_all(file: &mut File, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match file.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => drop(wait_for_room(file, None)),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Returns true if the file takes bytes now.
pub fn has_room(file: &File) -> bool {
    wait_for_room(file, Some(&ZERO))
}

/// Returns true if the file takes bytes before this timeout has passed.
fn wait_for_room(file: &File, timeout: Option<&Timespec>) -> bool {
    poll(&mut [PollFd::new(file, PollFlags::OUT)], timeout) == Ok(1)
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut buffer = self.buffer();
        buffer.waiting.extend_from_slice(bytes);
        if bytes.contains(&b'\n') || buffer.waiting.len() >= LONGEST {
            buffer.write_out();
        } else {
            buffer.timer.arm();
        }
        Ok(bytes.len())
    }

    /// The port flushes after every byte; ours go out by the line.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A new handle on one of the process' standard streams.
pub fn standard_stream(stream: &impl AsFd) -> io::Result<File> {
    stream.as_fd().try_clone_to_owned().map(File::from)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn output() -> (Output, tempfile::NamedTempFile) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let timer = Arc::new(FlushTimer::new().unwrap());
        (Output::new(Some(file.reopen().unwrap()), timer), file)
    }

    #[test]
    fn bytes_go_out_with_their_line_or_when_asked() {
        let (mut output, file) = output();
        output.write_all(b"login:").unwrap();
        assert_eq!(fs::read(file.path()).unwrap(), b"");
        assert!(output.try_flush());
        assert_eq!(fs::read(file.path()).unwrap(), b"login:");
        output.write_all(b" root\n").unwrap();
        assert_eq!(fs::read(file.path()).unwrap(), b"login: root\n");
    }

    #[test]
    fn bytes_that_wait_set_the_timer() {
        let (mut output, _file) = output();
        output.write_all(b"# ").unwrap();
        let timer = Arc::clone(&output.buffer().timer);
        assert_ne!(rustix::time::timerfd_gettime(&timer.fd).unwrap().it_value, ZERO);
    }

    #[test]
    fn a_hidden_console_keeps_its_last_lines() {
        let timer = Arc::new(FlushTimer::new().unwrap());
        let mut output = Output::new(None, timer);
        output.keep_tail();
        for line in 0..10_000 {
            write!(output, "line {line}\r\n").unwrap();
        }
        let tail = output.tail();
        assert_eq!(tail.lines().count(), LAST_LINES);
        assert!(tail.ends_with("line 9998\nline 9999"), "{tail}");
    }
}
