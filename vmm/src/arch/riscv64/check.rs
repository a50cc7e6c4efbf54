//! `tally check`, whose programs are for other processors.

use std::process::ExitCode;

use anyhow::{Result, bail};
use tally_machine::pmu::Choice;

/// Says so.
pub fn check(_pmu: Choice, _counters: Option<u32>) -> Result<ExitCode> {
    bail!("`tally check` has no programs for RISC-V hosts")
}
