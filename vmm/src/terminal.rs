//! The user's terminal while the guest's console is on it: raw, and put back whatever happens.

use std::io::{self, IsTerminal};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use guest_agent::protocol::Size;
use rustix::io::Errno;
use rustix::process::getpgrp;
use rustix::stdio::{stderr, stdin, stdout};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetpgrp, tcgetwinsize, tcsetattr};

/// How the terminal was before.
static SAVED: OnceLock<Termios> = OnceLock::new();
/// Whether it is raw now.
static IS_RAW: AtomicBool = AtomicBool::new(false);

/// Signals that end the process from within; the terminal is put back on their way.
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
    /// Makes standard input raw, if it is a terminal and ours to change.
    pub fn enter() -> io::Result<Option<Self>> {
        if !stdin().is_terminal() || !in_foreground() {
            return Ok(None);
        }
        let mut termios = tcgetattr(stdin())?;
        SAVED.get_or_init(|| termios.clone());
        restore_on_fatal_signals();
        // Nobody stops us for putting the terminal back from the background.
        // SAFETY: ignoring a signal runs no code.
        unsafe { libc::signal(libc::SIGTTOU, libc::SIG_IGN) };
        termios.make_raw();
        tcsetattr(stdin(), OptionalActions::Now, &termios)?;
        IS_RAW.store(true, Ordering::Relaxed);
        Ok(Some(Self(())))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        restore();
    }
}

/// A process in the background that changed the terminal would be stopped for it. Nobody is, if it is not the terminal
/// that controls this process.
fn in_foreground() -> bool {
    match tcgetpgrp(stdin()) {
        Ok(foreground) => foreground == getpgrp(),
        Err(error) => error == Errno::NOTTY,
    }
}

/// What ends a line of ours: a terminal that is raw does not go back to the line's begin by itself.
pub fn line_end() -> &'static str {
    if IS_RAW.load(Ordering::Relaxed) && io::stderr().is_terminal() { "\r\n" } else { "\n" }
}

/// Puts the terminal back; safe in a signal handler, for all it does is a store and one system call.
pub fn restore() {
    if let Some(saved) = SAVED.get() {
        IS_RAW.store(false, Ordering::Relaxed);
        // Nobody can mend an error here.
        let _ = tcsetattr(stdin(), OptionalActions::Now, saved);
    }
}

fn restore_on_fatal_signals() {
    extern "C" fn handler(signal: libc::c_int) {
        restore();
        // The handler is used once (SA_RESETHAND): when it returns, the signal arrives again and ends the process as it
        // would have, also if somebody sent it rather than a fault.
        // SAFETY: takes no pointer, and may be called in a handler.
        unsafe { libc::raise(signal) };
    }
    // SAFETY: all-zero is a valid `sigaction`: no flags, an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as extern "C" fn(libc::c_int) as libc::sighandler_t;
    action.sa_flags = libc::SA_RESETHAND | libc::SA_ONSTACK;
    for signal in FATAL {
        // SAFETY: the action is valid, and its handler does only what a handler may.
        unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) };
    }
}

/// How much a person may type ahead of a guest that does not read. The rest is lost, as on a real line; were it held back,
/// the keys that end the machine would be too.
pub const TYPE_AHEAD: usize = 4096;

/// The size of the terminal, if a standard stream is one.
pub fn size() -> Option<Size> {
    let mut sizes = [stdout(), stderr(), stdin()].into_iter().filter_map(|stream| tcgetwinsize(stream).ok());
    sizes.find(|size| size.ws_row > 0).map(|size| Size { rows: size.ws_row, columns: size.ws_col })
}

/// Finds Ctrl-A X in what the user types. Ctrl-A twice sends one to the guest; before any other key it sends both.
#[derive(Debug, Default)]
pub struct Escape {
    pending: bool,
}

impl Escape {
    const PREFIX: u8 = 1;

    /// Adds to `guest` what is meant for it; says whether the user asked for the end.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn type_in(chunks: &[&[u8]]) -> (Vec<u8>, bool) {
        let (mut escape, mut guest) = (Escape::default(), Vec::new());
        let quit = chunks.iter().any(|chunk| escape.feed(chunk, &mut guest));
        (guest, quit)
    }

    #[test]
    fn ctrl_a_x_ends_even_when_it_comes_in_two_reads() {
        assert_eq!(type_in(&[b"ls\x01x"]), (b"ls".to_vec(), true));
        assert_eq!(type_in(&[b"\x01", b"X"]), (vec![], true));
    }

    #[test]
    fn everything_else_reaches_the_guest() {
        assert_eq!(type_in(&[b"\x03\x04x"]), (b"\x03\x04x".to_vec(), false));
        assert_eq!(type_in(&[b"\x01\x01x"]), (b"\x01x".to_vec(), false));
        assert_eq!(type_in(&[b"\x01c"]), (b"\x01c".to_vec(), false));
    }
}
