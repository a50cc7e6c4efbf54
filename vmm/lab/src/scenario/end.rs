//! Waits for a script's end, and finds out where the script hangs if the end does not come in time.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use guest_images::Progress;

use crate::simulator::machine::{BOOT_LIMIT, Machine, Received};

/// Interval, in real time, at which is checked whether an answer where a script hangs may still come.
const INTERVAL: Duration = Duration::from_secs(10);

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

/// Asks the host's init, or else the simulator's monitor, where the script hangs.
fn place(machine: &mut Machine) -> Place {
    // QEMU finds out whether a port of the host can take input only when its main loop turns, and a host that is never
    // idle may have given it no reason to since init opened the port. A request to the monitor is one.
    let address = machine.instruction_pointer();
    machine.send("where");
    let mut text = String::new();
    let mut patience = Patience::new(machine.processor_time());
    let mut check = Instant::now() + INTERVAL;
    loop {
        match machine.next_line(check.saturating_duration_since(Instant::now())) {
            Received::Line(line) if line == "end" => return Place::Processes(text),
            Received::Line(line) => {
                text.push_str(&line);
                text.push('\n');
            }
            Received::Timeout => {}
            Received::End => break,
        }
        if Instant::now() >= check {
            if !patience.lasts(machine.processor_time()) {
                break;
            }
            check += INTERVAL;
        }
    }
    address.map_or(Place::Unknown, Place::Address)
}

/// How long a host's answer is waited for. What counts is how long the simulator has run on processors: on a busy
/// machine that can be a small part of the time that passes.
struct Patience {
    begin: Option<Duration>,
    last: Option<Duration>,
}

impl Patience {
    /// Time on processors in which a host answers that can answer at all.
    const ENOUGH: Duration = Duration::from_secs(5);
    /// A simulator that runs for less than this in an interval simulates a halted host, or has halted itself. So there
    /// are at most fifty intervals.
    const HALTED: Duration = Duration::from_millis(100);

    /// Begins when the simulator has run for this long.
    fn new(processor_time: Option<Duration>) -> Self {
        Self { begin: processor_time, last: processor_time }
    }

    /// Returns whether the answer may still come, an interval later.
    fn lasts(&mut self, processor_time: Option<Duration>) -> bool {
        let since = |before: Option<Duration>| Some(processor_time?.saturating_sub(before?));
        let (ran, ran_in_all) = (since(self.last), since(self.begin));
        self.last = processor_time;
        ran.is_some_and(|ran| ran >= Self::HALTED) && ran_in_all.is_some_and(|ran| ran < Self::ENOUGH)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_hardly_runs_is_waited_for_longer() {
        let seconds = |seconds| Some(Duration::from_secs(seconds));
        let mut patience = Patience::new(seconds(100));
        assert!(patience.lasts(seconds(102)));
        assert!(patience.lasts(seconds(104)));
        assert!(!patience.lasts(seconds(106)));
    }

    #[test]
    fn a_host_that_runs_is_waited_for_once() {
        let mut patience = Patience::new(Some(Duration::from_secs(100)));
        assert!(!patience.lasts(Some(Duration::from_secs(109))));
    }

    #[test]
    fn a_host_that_has_halted_is_waited_for_once() {
        let begin = Some(Duration::from_secs(100));
        assert!(!Patience::new(begin).lasts(Some(Duration::from_millis(100_050))));
        assert!(!Patience::new(begin).lasts(None));
    }
}
