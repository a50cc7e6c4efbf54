//! Pseudo-terminal sessions: runs a program on a pseudo-terminal, types, and waits for its output.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{ioctl_tiocsctty, setsid};
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::stdio::stdin;
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

/// A program on a pseudo-terminal of its own.
pub struct Session {
    terminal: File,
    child: Child,
    output: Receiver<Vec<u8>>,
    seen: Vec<u8>,
    matched: usize,
}

/// Input mode of the terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Input is passed on line by line, with echo and signals.
    Cooked,
    /// Every byte is passed on at once and unchanged.
    Raw,
}

impl Session {
    /// Starts the program with the terminal as its standard streams and as its controlling terminal.
    pub fn start(mut command: Command) -> io::Result<Self> {
        let (terminal, end) = open_terminal()?;
        let copy = || end.try_clone().map(Stdio::from);
        command.stdin(copy()?).stdout(copy()?).stderr(copy()?);
        // SAFETY: between fork and exec the closure makes system calls and touches no memory of the parent's.
        unsafe { command.pre_exec(take_terminal) };
        let child = command.spawn()?;
        // These are the last copies of the program's side in this process. Without them, reading ends when the program
        // does.
        drop((command, end));
        let mut reader = terminal.try_clone()?;
        let (sender, output) = channel();
        thread::spawn(move || {
            let mut chunk = [0; 4096];
            // read fails with EIO when no process has the program's side open any more.
            while let Ok(length @ 1..) = reader.read(&mut chunk) {
                if sender.send(chunk[..length].to_vec()).is_err() {
                    break;
                }
            }
        });
        Ok(Self { terminal, child, output, seen: Vec::new(), matched: 0 })
    }

    /// Waits until `text` appears behind the previous match. Returns an error if it does not appear in time.
    pub fn expect(&mut self, text: &str, limit: Duration) -> Result<(), String> {
        let deadline = Instant::now() + limit;
        loop {
            let new = &self.seen[self.matched..];
            if let Some(at) = new.windows(text.len()).position(|window| window == text.as_bytes()) {
                self.matched += at + text.len();
                return Ok(());
            }
            match self.output.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(chunk) => self.seen.extend(chunk),
                Err(RecvTimeoutError::Timeout) => {
                    return Err(format!("`{text}` did not appear:\n{}", self.seen()));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(format!("it ended before `{text}` appeared:\n{}", self.seen()));
                }
            }
        }
    }

    /// Types these bytes.
    pub fn type_in(&mut self, keys: &[u8]) -> io::Result<()> {
        self.terminal.write_all(keys)
    }

    /// Sets the terminal's size. The kernel sends the program SIGWINCH.
    pub fn resize(&self, rows: u16, columns: u16) -> io::Result<()> {
        let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        Ok(tcsetwinsize(&self.terminal, size)?)
    }

    /// Returns all output so far.
    pub fn seen(&self) -> String {
        String::from_utf8_lossy(&self.seen).into_owned()
    }

    /// Returns the terminal's current mode.
    pub fn mode(&self) -> Mode {
        // Both sides of a pseudo-terminal share their settings.
        let termios = tcgetattr(&self.terminal).expect("a pseudo-terminal has settings");
        let cooked = LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG;
        if termios.local_modes.contains(cooked) { Mode::Cooked } else { Mode::Raw }
    }

    /// Returns the program's process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the program to end. If it does not end in time, the error lists the state of its threads.
    pub fn wait(&mut self, limit: Duration) -> io::Result<ExitStatus> {
        let deadline = Instant::now() + limit;
        let status = loop {
            match self.child.try_wait()? {
                Some(status) => break status,
                None if Instant::now() > deadline => return Err(io::Error::other(threads(self.id())?)),
                None => thread::sleep(Duration::from_millis(10)),
            }
        };
        // The program's side is closed now, so the loop ends.
        while let Ok(chunk) = self.output.recv() {
            self.seen.extend(chunk);
        }
        Ok(status)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // A failed test must not leave a VM running. These calls fail if the program has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Lists the threads of a process: name, state, current system call and kernel stack.
fn threads(process: u32) -> io::Result<String> {
    let threads = fs::read_dir(format!("/proc/{process}/task"))?.map(|thread| {
        let thread = thread?.path();
        let contents =
            |file: &str| fs::read_to_string(thread.join(file)).unwrap_or_else(|error| error.to_string());
        let status = contents("status");
        let state = status.lines().find(|line| line.starts_with("State:")).unwrap_or_default();
        let facts = ["comm", "syscall", "stack"].map(contents);
        let [name, call, stack] = facts.each_ref().map(|text| text.trim_end());
        Ok(format!("\n{name}: {state}\ncall: {call}\n{stack}"))
    });
    Ok(format!("it has not ended{}", threads.collect::<io::Result<String>>()?))
}

/// Opens a pseudo-terminal, and returns the side of this process and the program's side.
fn open_terminal() -> io::Result<(File, OwnedFd)> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let ours = openpt(flags)?;
    unlockpt(&ours)?;
    let theirs = ioctl_tiocgptpeer(&ours, flags)?;
    Ok((File::from(ours), theirs))
}

/// Prepares the child process: default signal actions, and standard input as its controlling terminal.
fn take_terminal() -> io::Result<()> {
    // nohup ignores SIGHUP, and shells ignore the other two for background commands. Children inherit these settings.
    for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT] {
        // SAFETY: a default disposition runs no code.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    setsid()?;
    Ok(ioctl_tiocsctty(stdin())?)
}
