//! Waits for a script's end, and finds out where it is when that does not come.

use std::time::{Duration, Instant};

use crate::machine::{Heard, Machine};

/// How long the simulated host has to say where a script hangs, in real time.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long the simulated host may take to begin with the script, on a machine that is busy with other things too.
pub const BOOT_LIMIT: Duration = Duration::from_mins(2);

/// How a run ended.
pub enum End {
    /// The script ended with this status.
    Status(u8),
    /// The machine ended before it, in this way.
    Died(String),
    /// The limit came first.
    Hung(Place),
    /// The simulated host did not get as far as the script.
    NotBooted(Place),
}

/// Where a script hangs.
pub enum Place {
    /// What the simulated host says of its processes.
    Told(String),
    /// The host says nothing; its first processor is at this address.
    Address(u64),
    /// Nothing is known.
    Silent,
}

/// Waits for the script to end within its limit, and ends the machine.
pub fn watch(mut machine: Machine, limit: Duration) -> End {
    let mut deadline = Instant::now() + BOOT_LIMIT;
    let mut begun = false;
    loop {
        match machine.next_line(deadline.saturating_duration_since(Instant::now())) {
            Heard::End => {
                let status = machine.wait().map_or_else(|| "unknown".to_owned(), |status| status.to_string());
                return End::Died(status);
            }
            Heard::Line(line) if line == "begun" => {
                begun = true;
                deadline = Instant::now() + limit;
            }
            Heard::Line(line) => {
                if let Some(status) = line.strip_prefix("status ").and_then(|status| status.parse().ok()) {
                    return End::Status(status);
                }
            }
            Heard::Nothing if begun => return End::Hung(place(&mut machine)),
            Heard::Nothing => return End::NotBooted(place(&mut machine)),
        }
    }
}

fn place(machine: &mut Machine) -> Place {
    machine.ask("where");
    let deadline = Instant::now() + PATIENCE;
    let mut text = String::new();
    while let Heard::Line(line) = machine.next_line(deadline.saturating_duration_since(Instant::now())) {
        if line == "end" {
            return Place::Told(text);
        }
        text.push_str(&line);
        text.push('\n');
    }
    machine.instruction_pointer().map_or(Place::Silent, Place::Address)
}
