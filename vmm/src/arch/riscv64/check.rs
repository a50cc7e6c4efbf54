//! `tally check`, whose programs are for other processors.

use std::process::ExitCode;

use anyhow::{Result, bail};

use crate::cli::Check;

/// Says so.
pub fn check(_options: &Check) -> Result<ExitCode> {
    bail!("`tally check` has no programs for {} hosts", super::NAME)
}
