//! Output of the guest's serial port: bytes are gathered into lines, and only a vCPU that prints ever waits for a
//! reader.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};

use crate::protocol::ending::Ending;
use crate::run::event_loop::{Next, Ready, Subscriber, input_of};

/// Longest time that a byte waits for the rest of its line.
const FLUSH_AFTER: Timespec = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };
/// No time at all.
const ZERO: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
/// Maximum number of bytes that wait.
const MAX_WAITING: usize = 4096;
/// Number of bytes of a hidden console that are kept, to be shown if the guest dies.
const TAIL: usize = 8192;
/// Number of lines of these that are shown: enough for what a kernel prints when it panics.
const LAST_LINES: usize = 60;

/// Timer that expires when bytes have waited for [`FLUSH_AFTER`].
pub struct FlushTimer {
    fd: OwnedFd,
    /// True while the timer runs: it is not set again then, so that constant output does not delay it.
    armed: AtomicBool,
}

impl FlushTimer {
    /// Creates a timer, disarmed.
    pub fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let fd = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        Ok(Self { fd, armed: AtomicBool::new(false) })
    }

    /// Starts the timer, unless it runs.
    pub fn arm(&self) {
        let once = Itimerspec { it_interval: ZERO, it_value: FLUSH_AFTER };
        if !self.armed.swap(true, Ordering::AcqRel)
            && timerfd_settime(&self.fd, TimerfdTimerFlags::empty(), &once).is_err()
        {
            // Without a timer the bytes wait for the end of their line.
            self.armed.store(false, Ordering::Release);
        }
    }

    /// Records that the timer has expired.
    pub fn acknowledge(&self) {
        self.armed.store(false, Ordering::Release);
        // Non-blocking: an error means that the timer has been started again.
        let _ = rustix::io::read(&self.fd, &mut [0; 8]);
    }
}

impl AsRawFd for FlushTimer {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

/// Flushes the console's output when its timer expires.
pub struct Flusher {
    timer: Arc<FlushTimer>,
    output: Output,
}

impl Flusher {
    /// Creates a flusher of the output that arms this timer.
    pub fn new(timer: Arc<FlushTimer>, output: Output) -> Self {
        Self { timer, output }
    }
}

impl Subscriber for Flusher {
    type End = Ending;

    fn files(&self) -> Vec<libc::pollfd> {
        vec![input_of(&*self.timer)]
    }

    fn process(&mut self, ready: &Ready) -> Next<Ending> {
        if ready.has(&*self.timer) {
            self.timer.acknowledge();
            if !self.output.try_flush() {
                self.timer.arm();
            }
        }
        Next::Wait
    }
}

struct Buffer {
    waiting: Vec<u8>,
    file: Option<File>,
    tail: Option<VecDeque<u8>>,
    timer: Arc<FlushTimer>,
}

/// Destination of the serial port's output. Clones share it.
#[derive(Clone)]
pub struct Output(Arc<Mutex<Buffer>>);

impl Output {
    /// Creates an output into a file, if there is one. `timer` is armed when bytes wait; when it expires, a [`Flusher`]
    /// calls [`Output::try_flush`].
    pub fn new(file: Option<File>, timer: Arc<FlushTimer>) -> Self {
        Self(Arc::new(Mutex::new(Buffer { waiting: Vec::new(), file, tail: None, timer })))
    }

    /// Keeps the last bytes of the output, for [`Output::tail`].
    pub fn keep_tail(&self) {
        self.buffer().tail = Some(VecDeque::with_capacity(TAIL));
    }

    /// Writes the waiting bytes, if that is possible without blocking, and returns true if it was. A reader that takes
    /// nothing may block a vCPU that prints, but not the event loop, which can end the machine.
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

    /// Writes the waiting bytes, however long that takes.
    pub fn flush_all(&self) {
        self.buffer().write_out();
    }

    /// Returns the last lines of the output.
    pub fn tail(&self) -> String {
        let mut buffer = self.buffer();
        buffer.write_out();
        let bytes: Vec<u8> = buffer.tail.iter().flatten().copied().collect();
        // A guest's control characters must not reach the terminal.
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
            // An error means that nobody reads the console any more; the guest goes on.
            let _ = write_all(file, &self.waiting);
        }
        self.waiting.clear();
    }

    /// Returns true if the file takes the waiting bytes: a pipe that is ready takes [`MAX_WAITING`].
    fn has_room(&self) -> bool {
        self.file.as_ref().is_none_or(has_room)
    }
}

/// Writes all bytes, also to a file that somebody has made non-blocking.
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
        if bytes.contains(&b'\n') || buffer.waiting.len() >= MAX_WAITING {
            buffer.write_out();
        } else {
            buffer.timer.arm();
        }
        Ok(bytes.len())
    }

    /// Does nothing: the port flushes after every byte, but lines are written whole.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
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
    fn bytes_are_written_with_their_line_or_when_flushed() {
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
