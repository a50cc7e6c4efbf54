//! The user's terminal: raw while the guest's console is on it, and restored however the process ends or is stopped.
//! Whoever stops the process (a shell) uses the terminal meanwhile, with settings of its own.

use std::fs::File;
use std::io::{self, IsTerminal};
use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use guest_agent::protocol::Size;
use rustix::io::Errno;
use rustix::process::getpgrp;
use rustix::stdio::{stderr, stdin, stdout};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetpgrp, tcgetwinsize, tcsetattr};

use super::signals;

/// The terminal's settings before it was made raw.
static SAVED: OnceLock<Termios> = OnceLock::new();
/// True while the terminal is raw.
static IS_RAW: AtomicBool = AtomicBool::new(false);
/// True while there is a [`Raw`], also while the process is stopped or in the background.
static WANTS_RAW: AtomicBool = AtomicBool::new(false);

/// Signals of faults that end the process. Their handler restores the terminal.
const FATAL: [libc::c_int; 8] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGILL,
    libc::SIGFPE,
    libc::SIGABRT,
    libc::SIGSYS,
    libc::SIGTRAP,
    libc::SIGXCPU,
];

/// The terminal in raw mode, until this is dropped.
#[derive(Debug)]
pub struct Raw(());

impl Raw {
    /// Makes standard input raw, if it is a terminal and this process is in its foreground.
    pub fn enter() -> io::Result<Option<Self>> {
        if !stdin().is_terminal() || !in_foreground() {
            return Ok(None);
        }
        let termios = tcgetattr(stdin())?;
        let saved = SAVED.get_or_init(|| termios);
        restore_on_fatal_signals();
        // So that restoring the terminal from the background does not stop this process.
        // SAFETY: ignoring a signal runs no code.
        unsafe { libc::signal(libc::SIGTTOU, libc::SIG_IGN) };
        make_raw(saved)?;
        WANTS_RAW.store(true, Ordering::Relaxed);
        Ok(Some(Self(())))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        WANTS_RAW.store(false, Ordering::Relaxed);
        restore();
    }
}

/// Makes the terminal raw, from these settings.
fn make_raw(saved: &Termios) -> io::Result<()> {
    let mut raw = saved.clone();
    raw.make_raw();
    tcsetattr(stdin(), OptionalActions::Now, &raw)?;
    IS_RAW.store(true, Ordering::Relaxed);
    Ok(())
}

/// Makes the terminal raw again, if it was raw when this process was stopped. In the background it is not this
/// process's, and is left alone, also at the end.
pub fn resume() {
    if !WANTS_RAW.load(Ordering::Relaxed) {
        return;
    }
    match SAVED.get() {
        // An error means that the terminal is gone.
        Some(saved) if in_foreground() => drop(make_raw(saved)),
        _ => IS_RAW.store(false, Ordering::Relaxed),
    }
}

/// Restores the terminal and stops this process, as SIGTSTP does. The terminal is raw again when the process is
/// continued in the foreground.
pub fn stop() {
    restore();
    signals::stop();
    resume();
}

/// Returns true if this process may change the terminal. A process in the background would be stopped for it, unless
/// the terminal is not its controlling terminal.
fn in_foreground() -> bool {
    match tcgetpgrp(stdin()) {
        Ok(foreground) => foreground == getpgrp(),
        Err(error) => error == Errno::NOTTY,
    }
}

/// Returns the end of our own lines: a raw terminal needs a carriage return.
pub fn line_end() -> &'static str {
    if IS_RAW.load(Ordering::Relaxed) && io::stderr().is_terminal() { "\r\n" } else { "\n" }
}

/// Restores the terminal, if it is raw. It is safe in a signal handler: it makes a store and a system call.
pub fn restore() {
    if let Some(saved) = SAVED.get()
        && IS_RAW.swap(false, Ordering::Relaxed)
    {
        // An error means that the terminal is gone.
        let _ = tcsetattr(stdin(), OptionalActions::Now, saved);
    }
}

fn restore_on_fatal_signals() {
    extern "C" fn handler(signal: libc::c_int) {
        restore();
        // The handler is reset (SA_RESETHAND): when it returns, this signal ends the process as it would have without a
        // handler, also if it was sent and no fault. SAFETY: the call takes a number, and is async-signal-safe.
        unsafe { libc::raise(signal) };
    }
    // SAFETY: all-zero is a valid `sigaction`: no flags, an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as extern "C" fn(libc::c_int) as libc::sighandler_t;
    action.sa_flags = libc::SA_RESETHAND | libc::SA_ONSTACK;
    for signal in FATAL {
        // The sandbox's own restores the terminal as well, and so does that for a file that was truncated.
        let has_own = match signal {
            libc::SIGSYS => has_handler(signal),
            libc::SIGBUS => signals::HAS_HANDLER_OF_BUS.load(Ordering::Relaxed),
            _ => false,
        };
        if !has_own {
            // SAFETY: the action is valid, and its handler is async-signal-safe.
            unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) };
        }
    }
}

fn has_handler(signal: libc::c_int) -> bool {
    // SAFETY: all-zero is a valid `sigaction`: the default action.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: only reads the action, into a variable of this function.
    unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) };
    action.sa_sigaction != libc::SIG_DFL
}

/// Maximum number of typed bytes that wait for a guest that does not read. The rest is lost, as on a real serial line:
/// if it were not read, the keys that end the machine would not be seen either.
pub const TYPE_AHEAD: usize = 4096;

/// Returns the terminal's size, if a standard stream is a terminal.
pub fn size() -> Option<Size> {
    let mut sizes = [stdout(), stderr(), stdin()].into_iter().filter_map(|stream| tcgetwinsize(stream).ok());
    sizes.find(|size| size.ws_row > 0).map(|size| Size { rows: size.ws_row, columns: size.ws_col })
}

/// Finds Ctrl-A X in what the user types. Ctrl-A twice sends one Ctrl-A to the guest; Ctrl-A and any other key sends
/// both.
#[derive(Debug, Default)]
pub struct Escape {
    pending: bool,
}

impl Escape {
    const PREFIX: u8 = 1;

    /// Appends to `guest` what is meant for the guest. Returns true if the user asked for the end.
    pub fn feed(&mut self, typed: &[u8], guest: &mut impl Extend<u8>) -> bool {
        for &byte in typed {
            if std::mem::take(&mut self.pending) {
                match byte {
                    b'x' | b'X' => return true,
                    Self::PREFIX => guest.extend([Self::PREFIX]),
                    _ => guest.extend([Self::PREFIX, byte]),
                }
            } else if byte == Self::PREFIX {
                self.pending = true;
            } else {
                guest.extend([byte]);
            }
        }
        false
    }
}

/// Returns a duplicate of a standard stream.
pub fn standard_stream(stream: &impl AsFd) -> io::Result<File> {
    stream.as_fd().try_clone_to_owned().map(File::from)
}

#[cfg(test)]
mod tests;
