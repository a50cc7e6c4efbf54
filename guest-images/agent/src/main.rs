//! The agent of Tally's default guest: the guest's first process, once init has set the machine up.
//!
//! It asks the host over the control port what to run, runs it, and carries the command's streams between pipes or a
//! terminal in the guest and the ports. It never ends by itself, because the kernel does not survive its first process:
//! the host ends the machine.

mod control;
mod flow;
mod orphans;
mod ports;
mod program;
mod relay;
mod session;
mod shares;
mod sys;
mod terminal;
#[cfg(test)]
mod tests;

use std::env;
use std::process::{self, Command, ExitCode};

use crate::orphans::Orphans;
use crate::ports::Ports;
use crate::session::End;

fn main() -> ExitCode {
    if process::id() != 1 {
        eprintln!("agent: only init starts this, as the guest's first process");
        return ExitCode::FAILURE;
    }
    if let Err(reason) = serve() {
        eprintln!("tally: {reason}");
        if env::args().nth(1).as_deref() == Some("shell") {
            give_up();
        }
    }
    sys::power_off();
    Orphans::reap_for_ever()
}

/// Ends the machine with the status of Tally's own failures, where the console is the user's terminal: its debug port makes
/// 125 of 62. A machine that goes off before its command has ended is a failure as it is, and Tally shows what was said.
fn give_up() {
    sys::drain_console();
    if let Err(error) = Command::new("/lib/tally/outb").args(["0xf4", "62"]).status() {
        eprintln!("tally: /lib/tally/outb: {error}");
    }
}

/// Returns when the machine is to end.
fn serve() -> Result<(), String> {
    let orphans = Orphans::new().map_err(|error| format!("the agent cannot watch processes: {error}"))?;
    let ports = Ports::open()?;
    match session::serve(&ports, Some(&orphans)) {
        Ok(End::Left) => Ok(()),
        // The ports stay open: the host reads from them what it has not read yet.
        Ok(End::Told) => Orphans::reap_for_ever(),
        Err(error) => Err(format!("the agent cannot go on: {error}")),
    }
}
