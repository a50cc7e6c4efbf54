//! `tally check`: whether this host's counters count correctly in guests. Its programs are for x86-64.

#[cfg(target_arch = "x86_64")]
mod x86_64;

/// How the report is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Line by line, as it comes about.
    Text,
    /// When everything is done.
    Json,
}

#[cfg(target_arch = "x86_64")]
pub use x86_64::check;

/// `tally check`: returns an error.
#[cfg(target_arch = "riscv64")]
pub fn check(
    _pmu: tally_machine::pmu::Choice,
    _counters: Option<u32>,
    _format: Format,
) -> anyhow::Result<std::process::ExitCode> {
    anyhow::bail!("`tally check` has no programs for RISC-V hosts")
}
