//! Runs a command that can be interrupted. A shell has what it starts in the background ignore interrupts, and so does all that
//! this starts; Tally takes that for what its user wants.
//!
//! Usage: `interruptible COMMAND ARGUMENT...`

use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    for signal in [libc::SIGINT, libc::SIGQUIT] {
        // SAFETY: the default action runs no code of ours.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    let mut words = std::env::args_os().skip(1);
    let Some(program) = words.next() else {
        eprintln!("interruptible: no command");
        return ExitCode::FAILURE;
    };
    let error = Command::new(program).args(words).exec();
    eprintln!("interruptible: {error}");
    ExitCode::FAILURE
}
