//! Runs a command with the default action for SIGINT and SIGQUIT. A shell starts background commands with these signals
//! ignored, and their children inherit this. Tally keeps on ignoring signals that it was started to ignore.
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
