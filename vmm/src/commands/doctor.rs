//! `tally doctor`: prints what this host can do, one fact per line, with the command that fixes what it cannot. The
//! last fact is the verdict.

mod built;
pub mod holders;
mod keys;
mod kvm;
mod perf;
mod process;

use std::io::Write;
use std::process::ExitCode;
use std::time::SystemTime;

use anyhow::Result;
use guest_images::cache::Cache;

use crate::arch::host;
use crate::cli::Doctor;
use crate::host::fact::{self, Fact, State};
use crate::host::{lab, printer};
use crate::sandbox;

/// `tally doctor`: examines the host and prints the facts.
pub fn doctor(options: &Doctor) -> Result<ExitCode> {
    // Events are opened as those of a run are, by a process that starts before KVM is opened.
    let confined = sandbox::broker::start(sandbox::Mode::On, 1);
    let mut facts: Vec<Fact> =
        [host::facts(), vec![Fact::note("kernel", fact::kernel())], kvm::facts(), process::facts()].concat();
    match confined {
        Ok(()) => facts.extend(perf::facts()),
        Err(error) => facts.push(Fact::bad(SANDBOX, format!("{error:#}"))),
    }
    facts.extend(match Cache::open() {
        Ok(cache) => [built::facts(&cache), vec![keys::fact(SystemTime::now())]].concat(),
        Err(error) => vec![Fact::note("cache", format!("what is built cannot be kept: {error}"))],
    });
    facts.push(verdict(&facts));
    let mut out = printer::out();
    if options.json {
        let list: Vec<_> = facts.iter().map(Fact::json).collect();
        writeln!(out, "{}", serde_json::Value::from(list))?;
    } else {
        for fact in &facts {
            writeln!(out, "{fact}")?;
        }
    }
    let is_good = facts.iter().all(|fact| fact.state != State::Bad);
    Ok(if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Subject of the fact that no run can be confined.
const SANDBOX: &str = "sandbox";

/// Verdict where no Linux guest runs.
const NOT_HERE: &str = if lab::LAB_AVAILABLE {
    "Linux guests run only in the lab: `tally lab run -- perf stat true`"
} else {
    "no guests run here"
};
/// Verdict where Linux guests run without a PMU.
const WITHOUT: &str = "Linux guests run here, but without a PMU until what is BAD above is mended";
/// Where guests have a PMU, after [`WITHOUT`].
const WITH_ONE: &str =
    if lab::LAB_AVAILABLE { "; with one in the lab: `tally lab run -- perf stat true`" } else { "" };

/// Returns the verdict on these facts.
fn verdict(facts: &[Fact]) -> Fact {
    let about = "verdict";
    let is_bad =
        |about: &[&str]| facts.iter().any(|fact| fact.state == State::Bad && about.contains(&fact.about));
    if is_bad(&[kvm::ABOUT, kvm::CAPABILITY, kvm::LINUX, SANDBOX]) {
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
    fn the_verdict_follows_from_the_bad_facts() {
        let good = Fact::good(kvm::ABOUT, "");
        let says = |fact: Fact| verdict(&[good.clone(), fact]).says;
        assert!(says(Fact::note("watchdog", "")).starts_with("Linux guests with a PMU run here"));
        assert!(says(Fact::bad("pmu", "")).starts_with("Linux guests run here, but without a PMU"));
        for about in [kvm::ABOUT, kvm::CAPABILITY, kvm::LINUX, SANDBOX] {
            assert_eq!(says(Fact::bad(about, "")), NOT_HERE);
        }
    }
}
