//! Waits for a script's end, and finds out where the script hangs if the end does not come in time.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use guest_images::Progress;

use crate::machine::{Machine, Received};

/// Timeout of the request where a script hangs, in real time.
const WHERE_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of the simulated host's boot, in real time. It is long enough for a machine that is busy with other work
/// too.
pub const BOOT_LIMIT: Duration = Duration::from_mins(2);

/// The end of a run.
pub enum End {
    /// The script ended with this status.
    Status(u8),
    /// The machine ended before the script did, with this exit status.
    Died(String),
    /// The script was still running at its timeout.
    Hung(Place),
    /// The simulated host did not start the script in time.
    NotBooted(Place),
}

/// The place where a script hangs.
pub enum Place {
    /// The host's report of the script's processes.
    Processes(String),
    /// The host does not answer; its first CPU executes this address.
    Address(u64),
    /// The host does not answer, and neither does the monitor.
    Unknown,
}

/// A line on the terminal that says what is waited for, until there is output.
pub struct WaitDisplay<'a> {
    progress: Mutex<Option<&'a mut Progress>>,
    since: Instant,
}

impl<'a> WaitDisplay<'a> {
    /// Begins to wait.
    pub fn new(progress: &'a mut Progress) -> Self {
        Self { progress: Mutex::new(Some(progress)), since: Instant::now() }
    }

    /// Shows what is waited for, and since when.
    fn show(&self, what: &str) {
        if let Some(progress) = self.lock().as_mut() {
            progress.wait(&format!("{what} ... {} s", self.since.elapsed().as_secs()));
        }
    }

    /// Removes the line, and shows nothing any more. Output can be written in its place when this returns.
    pub fn end(&self) {
        if let Some(progress) = self.lock().take() {
            progress.clear();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<&'a mut Progress>> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Waits for the script to end within its limit, and ends the machine.
pub fn watch(mut machine: Machine, limit: Duration, waiting: &WaitDisplay) -> End {
    /// Interval at which the display is updated.
    const REDRAW: Duration = Duration::from_secs(1);
    let mut deadline = Instant::now() + BOOT_LIMIT;
    let mut begun = false;
    loop {
        waiting.show(if begun { "running on the simulated host" } else { "booting the simulated host" });
        match machine.next_line(deadline.saturating_duration_since(Instant::now()).min(REDRAW)) {
            Received::End => {
                let status = machine.wait().map_or_else(|| "unknown".to_owned(), |status| status.to_string());
                return End::Died(status);
            }
            Received::Line(line) if line == "begun" => {
                begun = true;
                deadline = Instant::now() + limit;
            }
            Received::Line(line) => {
                if let Some(status) = line.strip_prefix("status ").and_then(|status| status.parse().ok()) {
                    return End::Status(status);
                }
            }
            Received::Timeout if Instant::now() < deadline => {}
            Received::Timeout if begun => return End::Hung(place(&mut machine)),
            Received::Timeout => return End::NotBooted(place(&mut machine)),
        }
    }
}

/// Asks the host's init, or else QEMU's monitor, where the script hangs.
fn place(machine: &mut Machine) -> Place {
    machine.send("where");
    let deadline = Instant::now() + WHERE_TIMEOUT;
    let mut text = String::new();
    while let Received::Line(line) = machine.next_line(deadline.saturating_duration_since(Instant::now())) {
        if line == "end" {
            return Place::Processes(text);
        }
        text.push_str(&line);
        text.push('\n');
    }
    machine.instruction_pointer().map_or(Place::Unknown, Place::Address)
}
