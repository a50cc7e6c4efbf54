//! `tally doctor`: what this host can do, one line a fact, and for what it cannot the command that mends it. The last fact
//! is the verdict.

mod built;
mod holders;
mod kvm;
mod perf;
mod process;

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::Result;

use crate::arch::host;
use crate::cli::Doctor;
use crate::fact::{self, Fact, State};
use crate::lab;

pub use holders::holders;

/// Examines the host and prints what was found.
pub fn doctor(options: &Doctor) -> Result<ExitCode> {
    let mut facts: Vec<Fact> = [
        host::facts(),
        vec![Fact::note("kernel", fact::kernel())],
        kvm::facts(),
        process::facts(),
        perf::facts(),
        built::facts(),
    ]
    .concat();
    facts.push(verdict(&facts));
    let mut out = io::stdout().lock();
    if options.json {
        let list: Vec<_> = facts.iter().map(Fact::json).collect();
        writeln!(out, "{}", serde_json::Value::from(list))?;
    } else {
        for fact in &facts {
            writeln!(out, "{fact}")?;
        }
    }
    let is_well = facts.iter().all(|fact| fact.state != State::Bad);
    Ok(if is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Where guests run if not here.
const NOT_HERE: &str = if lab::IS_HERE {
    "Linux guests run only in the lab: `tally lab run -- perf stat true`"
} else {
    "no guests run here"
};
const WITHOUT: &str = "Linux guests run here, but without a PMU until what is BAD above is mended";
/// Where they have a PMU if not here.
const WITH_ONE: &str =
    if lab::IS_HERE { "; with one in the lab: `tally lab run -- perf stat true`" } else { "" };

/// What all of it comes to.
fn verdict(facts: &[Fact]) -> Fact {
    let about = "verdict";
    let is_bad =
        |about: &[&str]| facts.iter().any(|fact| fact.state == State::Bad && about.contains(&fact.about));
    if is_bad(&[kvm::ABOUT, kvm::CAPABILITY, kvm::LINUX]) {
        Fact::bad(about, NOT_HERE)
    } else if facts.iter().any(|fact| fact.state == State::Bad) {
        Fact::bad(about, format!("{WITHOUT}{WITH_ONE}"))
    } else {
        Fact::good(about, "Linux guests with a PMU run here: `tally run -- perf stat true`")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verdict_is_what_the_facts_come_to() {
        let well = Fact::good(kvm::ABOUT, "");
        let says = |fact: Fact| verdict(&[well.clone(), fact]).says;
        assert!(says(Fact::note("watchdog", "")).starts_with("Linux guests with a PMU run here"));
        assert!(says(Fact::bad("pmu", "")).starts_with("Linux guests run here, but without a PMU"));
        for about in [kvm::ABOUT, kvm::CAPABILITY, kvm::LINUX] {
            assert_eq!(says(Fact::bad(about, "")), NOT_HERE);
        }
    }
}
