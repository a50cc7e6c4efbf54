//! `tally check`, which is not available on RISC-V: its programs are for x86-64.

use std::process::ExitCode;

use anyhow::{Result, bail};
use tally_machine::pmu::Choice;

/// `tally check`: returns an error.
pub fn check(_pmu: Choice, _counters: Option<u32>) -> Result<ExitCode> {
    bail!("`tally check` has no programs for RISC-V hosts")
}
