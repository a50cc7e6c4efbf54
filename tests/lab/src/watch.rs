//! Waits for a script's end, and finds out where it is when that does not come.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use guest_images::Progress;

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

/// Shows what is waited for, until there is something else to see.
pub struct Waiting<'a> {
    progress: Mutex<Option<&'a mut Progress>>,
    since: Instant,
}

impl<'a> Waiting<'a> {
    /// Begins to wait.
    pub fn new(progress: &'a mut Progress) -> Self {
        Self { progress: Mutex::new(Some(progress)), since: Instant::now() }
    }

    /// It is this that is waited for.
    fn show(&self, what: &str) {
        if let Some(progress) = self.lock().as_mut() {
            progress.wait(&format!("{what} ... {} s", self.since.elapsed().as_secs()));
        }
    }

    /// There is something else to see: nothing is shown any more. It ends with the call, so that what is there can be
    /// written over.
    pub fn over(&self) {
        if let Some(progress) = self.lock().take() {
            progress.clear();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<&'a mut Progress>> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits for the script to end within its limit, and ends the machine.
pub fn watch(mut machine: Machine, limit: Duration, waiting: &Waiting) -> End {
    /// How often what is waited for is shown anew.
    const REDRAW: Duration = Duration::from_secs(1);
    let mut deadline = Instant::now() + BOOT_LIMIT;
    let mut begun = false;
    loop {
        waiting.show(if begun { "running on the simulated host" } else { "booting the simulated host" });
        match machine.next_line(deadline.saturating_duration_since(Instant::now()).min(REDRAW)) {
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
            Heard::Nothing if Instant::now() < deadline => {}
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
