//! The agent of Tally's default guest. The init script replaces itself with the agent, which is process 1 from then on.
//!
//! The agent receives a command over the control port and runs it. It copies the command's streams between the ports
//! and pipes or a terminal in the guest. It never exits, because the kernel panics when process 1 does. The host ends
//! the virtual machine instead.

mod connections;
mod control;
mod flow;
mod identity;
mod network;
mod orphans;
mod ports;
mod program;
mod read_ahead;
mod relay;
mod restored;
mod root;
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
    #[cfg(target_arch = "x86_64")]
    if env::args().next().is_some_and(|name| name.ends_with("ebb-sample")) {
        return tally_ebb::sample::main();
    }
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

/// Ends the virtual machine with the status of Tally's own errors: writing 62 to the debug-exit port gives status 125.
/// This is only necessary for a shell on the serial console. If the machine powers off before a command has ended,
/// Tally reports an error anyway, and shows the console's output.
fn give_up() {
    sys::drain_console();
    let mut outb = Command::new("/lib/tally/outb");
    root::leave(&mut outb);
    if let Err(error) = outb.args(["0xf4", "62"]).status() {
        eprintln!("tally: /lib/tally/outb: {error}");
    }
}

/// Serves the host. Returns when the virtual machine should power off.
fn serve() -> Result<(), String> {
    let orphans = Orphans::new().map_err(|error| format!("the agent cannot watch processes: {error}"))?;
    let ports = Ports::open()?;
    match session::serve(&ports, Some(&orphans)) {
        Ok(End::ShellExited) => Ok(()),
        // Keeps the ports open until the host has read all output.
        Ok(End::Reported) => Orphans::reap_for_ever(),
        Err(error) => Err(format!("the agent cannot continue: {error}")),
    }
}
