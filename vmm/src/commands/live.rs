//! Commands that show running VMs again and again: on a terminal, the text is redrawn at each interval until a key or a
//! signal ends it; elsewhere, it is printed block by block.

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::commands::client::ClientError;
use crate::host::printer::{self, Screen};
use crate::host::terminal::{self, Raw};
use crate::protocol::ending::FAILURE;
use crate::run::signal_thread::Signals;

/// Keys that end the live view: q, Ctrl-C, Ctrl-D.
const KEYS: [u8; 3] = [b'q', 3, 4];

/// What ended a wait.
enum Woken {
    /// The interval has passed.
    Interval,
    /// The terminal's size has changed, or a shell may have written to it.
    Screen,
    /// A signal that stops the process.
    Stop,
    /// A key that ends the live view.
    Key,
    /// A signal that ends the live view.
    Signal(i32),
}

/// Result of one look at all VMs.
pub struct Looked {
    /// What is shown.
    pub lines: Vec<String>,
    /// Why some VMs are not looked at any more.
    pub gone: Vec<ClientError>,
    /// There is a VM that can be looked at again.
    pub more: bool,
}

/// Returns whether VMs are shown on the terminal, and not printed block by block.
pub fn is_drawn(count: Option<u32>) -> bool {
    io::stdout().is_terminal() && count.is_none()
}

/// Shows VMs live if standard output is a terminal, or else prints `count` blocks. Ends earlier if no VM is left.
pub fn show(interval: Duration, count: Option<u32>, look: &mut dyn FnMut() -> Looked) -> Result<ExitCode> {
    if is_drawn(count) {
        return draw(interval, look);
    }
    unless_closed(print(interval, count, look))?;
    Ok(ExitCode::SUCCESS)
}

/// Ignores that a reader has closed the pipe: it has read enough.
pub fn unless_closed(printed: io::Result<()>) -> io::Result<()> {
    printed.or_else(|error| if error.kind() == io::ErrorKind::BrokenPipe { Ok(()) } else { Err(error) })
}

/// Prints blocks of text, `count` times or until no VM is left.
fn print(interval: Duration, count: Option<u32>, look: &mut dyn FnMut() -> Looked) -> io::Result<()> {
    let mut out = printer::out();
    for round in 0.. {
        thread::sleep(interval);
        let Looked { lines, gone, more } = look();
        if round > 0 && !lines.is_empty() {
            writeln!(out)?;
        }
        for line in lines {
            writeln!(out, "{line}")?;
        }
        out.flush()?;
        for error in gone {
            printer::say(&error);
        }
        if !more || count.is_some_and(|count| round + 1 >= count) {
            break;
        }
    }
    Ok(())
}

/// Draws text until a key or a signal ends the live view, or all VMs have ended.
fn draw(interval: Duration, look: &mut dyn FnMut() -> Looked) -> Result<ExitCode> {
    const INTERRUPTED: u8 = 128;
    let signals = Signals::start().context("cannot start the signal thread")?;
    let raw = Raw::enter().context("cannot make the terminal raw")?;
    let mut screen = Screen::enter()?;
    let mut lines = vec!["the first figures come in a moment; q ends this".to_owned()];
    let mut all_gone = Vec::new();
    let (mut ended_by, mut is_over) = (None, false);
    while !is_over {
        Screen::draw(&lines)?;
        match wait(&signals, raw.is_some(), interval)? {
            Woken::Interval => {
                let Looked { lines: found, gone, more } = look();
                lines = found;
                all_gone.extend(gone);
                is_over = !more;
            }
            Woken::Screen => {}
            Woken::Stop => {
                drop(screen);
                terminal::stop();
                screen = Screen::enter()?;
            }
            Woken::Key => break,
            Woken::Signal(signal) => {
                ended_by = Some(signal);
                break;
            }
        }
    }
    drop(screen);
    drop(raw);
    for error in all_gone {
        printer::say(&error);
    }
    let status = |signal| u8::try_from(signal).map_or(FAILURE, |signal| INTERRUPTED | signal);
    Ok(ended_by.map_or(ExitCode::SUCCESS, |signal| ExitCode::from(status(signal))))
}

/// Waits for the interval, a resized terminal, a signal, or one of [`KEYS`]. Other keys do nothing.
fn wait(signals: &Signals, has_keys: bool, interval: Duration) -> io::Result<Woken> {
    let end = Instant::now() + interval;
    let stdin = io::stdin();
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(Woken::Interval);
        }
        let mut files = vec![PollFd::new(signals, PollFlags::IN)];
        if has_keys {
            files.push(PollFd::new(&stdin, PollFlags::IN));
        }
        poll(&mut files, Some(&Timespec::try_from(left).map_err(io::Error::other)?))?;
        let came = |number: usize| files.get(number).is_some_and(|file| !file.revents().is_empty());
        if came(0) {
            match signals.next() {
                Some(libc::SIGWINCH) => return Ok(Woken::Screen),
                Some(libc::SIGTSTP) => return Ok(Woken::Stop),
                Some(libc::SIGCONT) => {
                    terminal::resume();
                    return Ok(Woken::Screen);
                }
                Some(signal) => return Ok(Woken::Signal(signal)),
                None => {}
            }
        }
        if came(1) {
            let mut typed = [0; 64];
            let count = rustix::io::read(&stdin, &mut typed)?;
            // A read of no bytes means that the terminal is gone.
            if count == 0 || typed[..count].iter().any(|key| KEYS.contains(key)) {
                return Ok(Woken::Key);
            }
        }
    }
}
