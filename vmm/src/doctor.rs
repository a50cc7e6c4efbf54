//! `tally doctor`: what this host can do, one line a fact, and for what it cannot the command that mends it.

mod fact;
mod host;
mod kvm;
mod perf;

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::Result;

use crate::cli::Doctor;
use fact::{Fact, State};

pub use host::{named_kernel, processor};

/// Examines the host and prints what was found.
pub fn doctor(options: &Doctor) -> Result<ExitCode> {
    let facts: Vec<Fact> = [host::facts(), kvm::facts(), perf::facts()].concat();
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
