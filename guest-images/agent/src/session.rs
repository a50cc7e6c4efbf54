//! The session with the host, from the first message to the last one.

use std::fs;
use std::io::{self, Result};
use std::path::Path;

use guest_agent::protocol::{Start, ToHost};

use crate::control::Control;
use crate::identity::Identity;
use crate::orphans::Orphans;
use crate::ports::Ports;
use crate::program::{self, Started};
use crate::{network, relay, restored, root, shares};

/// How the session ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The result has been reported to the host, which will end the virtual machine.
    Reported,
    /// The user has left the shell. The agent has to power off the virtual machine.
    ShellExited,
}

/// Serves the host. Returns errors of the ports and of the protocol. Errors of the command are reported to the host.
pub fn serve(ports: &Ports, orphans: Option<&Orphans>) -> Result<End> {
    let mut control = Control::new(&ports.control);
    let start = control.start()?;
    let last = match prepare(&start) {
        Err(reason) => ToHost::Failed(reason),
        Ok(()) if start.command.is_empty() => {
            relay::run(&mut program::shell(&start)?, &mut control, orphans)?;
            return Ok(End::ShellExited);
        }
        Ok(()) => match start.user.as_deref().map(Identity::of).transpose() {
            Err(reason) => ToHost::Failed(reason),
            Ok(identity) => run(&start, identity.as_ref(), ports, &mut control, orphans)?,
        },
    };
    control.send(&last)?;
    control.flush()?;
    Ok(End::Reported)
}

fn run(
    start: &Start,
    identity: Option<&Identity>,
    ports: &Ports,
    control: &mut Control,
    orphans: Option<&Orphans>,
) -> Result<ToHost> {
    let started = match program::start(start, identity, ports) {
        Ok(started) => started,
        Err(error) => return Ok(ToHost::Failed(format!("cannot make the command's streams: {error}"))),
    };
    match started {
        Started::Running(mut program) => {
            let status = relay::run(&mut program, control, orphans)?;
            relay::finish(program.outputs)?;
            Ok(ToHost::Exited(status))
        }
        Started::Failed { status, outputs } => {
            relay::finish(outputs)?;
            Ok(ToHost::Exited(status))
        }
    }
}

/// Makes up for a restored state, sets up the network, mounts the root and the shares, and checks the working
/// directory. The error is for the user.
fn prepare(start: &Start) -> std::result::Result<(), String> {
    if let Some(from) = &start.restored {
        restored::catch_up(from).map_err(|error| format!("the restored guest cannot continue: {error}"))?;
    }
    start.network.iter().try_for_each(network::set_up)?;
    root::enter(start)?;
    start.shares.iter().try_for_each(shares::mount)?;
    let directory = Path::new(program::directory(start));
    // An image may have it where the guest has a folder of its own: /run, /tmp.
    if start.root.is_some() {
        let _ = fs::create_dir_all(directory);
    }
    let reason = match fs::metadata(directory) {
        Ok(found) if found.is_dir() => return Ok(()),
        Ok(_) => io::ErrorKind::NotADirectory.into(),
        Err(error) => error,
    };
    Err(format!("cannot start in {}: {reason}", directory.display()))
}
