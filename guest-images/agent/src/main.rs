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

use std::process::{self, ExitCode};

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
    }
    sys::power_off();
    Orphans::reap_for_ever()
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
