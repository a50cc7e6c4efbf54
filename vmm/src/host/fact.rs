//! A fact about the host.

use std::{fmt, fs};

use serde_json::{Value, json};

/// What a fact means for guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// The host has what guests need.
    Good,
    /// It keeps guests or their counters from working.
    Bad,
    /// It is for information.
    Note,
}

/// A fact about the host. Commands in its text stand between backticks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fact {
    pub state: State,
    /// Subject of the fact, in a word.
    pub about: &'static str,
    pub says: String,
}

impl Fact {
    /// Returns a fact that lets guests run.
    pub fn good(about: &'static str, says: impl Into<String>) -> Self {
        Self { state: State::Good, about, says: says.into() }
    }

    /// Returns a fact that keeps guests or their counters from working.
    pub fn bad(about: &'static str, says: impl Into<String>) -> Self {
        Self { state: State::Bad, about, says: says.into() }
    }

    /// Returns a fact for information.
    pub fn note(about: &'static str, says: impl Into<String>) -> Self {
        Self { state: State::Note, about, says: says.into() }
    }

    /// Returns the fact as `--json` prints it.
    pub fn json(&self) -> Value {
        let state = match self.state {
            State::Good => "good",
            State::Bad => "bad",
            State::Note => "note",
        };
        let commands: Vec<&str> = self.says.split('`').skip(1).step_by(2).collect();
        json!({ "about": self.about, "state": state, "says": self.says, "commands": commands })
    }
}

impl fmt::Display for Fact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.state {
            State::Good => "ok",
            State::Bad => "BAD",
            State::Note => "-",
        };
        write!(f, "{state:4}{:12}{}", self.about, self.says)
    }
}

/// The kernel that runs.
pub fn kernel() -> String {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!("Linux {}", release.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_lists_the_commands() {
        let fact = Fact::bad("perf", "it is forbidden: `sudo sysctl a=1`, or `sudo setcap b tally`");
        let json = fact.json();
        assert_eq!(json["commands"], json!(["sudo sysctl a=1", "sudo setcap b tally"]));
        assert_eq!((&json["state"], &json["about"]), (&json!("bad"), &json!("perf")));
        assert_eq!(Fact::good("perf", "all is well").json()["commands"], json!([]));
    }

    #[test]
    fn a_bad_fact_is_marked() {
        assert_eq!(Fact::bad("kvm", "absent").to_string(), "BAD kvm         absent");
    }
}
