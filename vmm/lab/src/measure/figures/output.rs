//! Runs a measuring script, and takes what it prints.

use guest_images::Progress;

use crate::error::{Error, Result};
use crate::scenario::Scenario;

/// Runs a measuring script. Returns what it printed.
pub fn run(scenario: &Scenario, progress: &mut Progress) -> Result<String> {
    let outcome = scenario.run(progress)?;
    if outcome.status == 0 {
        Ok(outcome.text())
    } else {
        Err(Error::Command(String::from_utf8_lossy(&outcome.stderr).trim().to_owned()))
    }
}

/// The error of a script that printed something else than it should.
pub fn unreadable(text: &str) -> Error {
    Error::Command(format!("the measuring script printed\n{text}"))
}
