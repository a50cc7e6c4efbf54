//! From the first message to the last one.

use std::fs;
use std::io::{self, Result};
use std::path::Path;

use guest_agent::protocol::{Start, ToHost};

use crate::control::Control;
use crate::orphans::Orphans;
use crate::ports::Ports;
use crate::program::{self, Started};
use crate::{relay, shares};

/// How the session ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The host has been told all that there is to tell, and will end the machine.
    Told,
    /// The user has left the shell: the machine is to end.
    Left,
}

/// Does what the host says. An error is about the ports or the messages: what is wrong with the command, the host is
/// told.
pub fn serve(ports: &Ports, orphans: Option<&Orphans>) -> Result<End> {
    let mut control = Control::new(&ports.control);
    let start = control.start()?;
    let last = match prepare(&start) {
        Err(reason) => ToHost::Failed(reason),
        Ok(()) if start.command.is_empty() => {
            relay::run(&mut program::shell(&start)?, &mut control, orphans)?;
            return Ok(End::Left);
        }
        Ok(()) => run(&start, ports, &mut control, orphans)?,
    };
    control.send(&last)?;
    control.flush()?;
    Ok(End::Told)
}

fn run(start: &Start, ports: &Ports, control: &mut Control, orphans: Option<&Orphans>) -> Result<ToHost> {
    let started = match program::start(start, ports) {
        Ok(started) => started,
        Err(error) => return Ok(ToHost::Failed(format!("cannot make the command's streams: {error}"))),
    };
    match started {
        Started::Running(mut program) => {
            let status = relay::run(&mut program, control, orphans)?;
            relay::finish(program.outputs)?;
            Ok(ToHost::Exited(status))
        }
        Started::Refused { status, outputs } => {
            relay::finish(outputs)?;
            Ok(ToHost::Exited(status))
        }
    }
}

/// Makes the place that the command starts in. The error is for the user.
fn prepare(start: &Start) -> std::result::Result<(), String> {
    start.shares.iter().try_for_each(shares::mount)?;
    let folder = Path::new(program::folder(start));
    let reason = match fs::metadata(folder) {
        Ok(found) if found.is_dir() => return Ok(()),
        Ok(_) => io::ErrorKind::NotADirectory.into(),
        Err(error) => error,
    };
    Err(format!("cannot start in {}: {reason}", folder.display()))
}
