//! The command line. Other people's scripts depend on it.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{ArgAction, Args, Parser, Subcommand};

use crate::FAILURE;
use crate::memory::Size;
use crate::pmu::Choice;

/// A KVM virtual machine monitor for measuring software
#[derive(Debug, Parser)]
#[command(version, after_help = "Example:\n  tally run -- uname -a")]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Boot a guest, and run a command in it if one is given
    Run(Run),
    /// Tell what this host can do, and what mends what it cannot
    Doctor(Doctor),
    /// Check that this host's counters count right in guests, with programs whose counts are known
    Check(Check),
    /// The simulated host for machines without a PMU or KVM: runs `tally-lab`
    #[command(disable_help_flag = true)]
    Lab {
        /// What `tally-lab` is given
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
}

/// The options of `tally run`.
#[derive(Debug, Args)]
#[command(after_help = "\
With COMMAND, the default guest runs it; its output and status become Tally's. Without, the guest's console
is on the terminal, and Ctrl-A X ends the machine. Failures of Tally itself have status 125.

Examples:
  tally run -- perf stat true
  tally run --kernel vmlinux --append 'single' --cpus 4 --memory 2G")]
pub struct Run {
    /// vmlinux, bzImage or a multiboot image [default: the default guest's kernel]
    #[arg(long, value_name = "PATH")]
    pub kernel: Option<PathBuf>,
    /// The initrd, or a multiboot image's modules: 'FILE ARGUMENTS,FILE ...' [default: the default guest's]
    #[arg(long, value_name = "PATH")]
    pub initrd: Option<PathBuf>,
    /// More for the kernel's command line, after what Tally needs
    #[arg(long, value_name = "STRING", default_value = "", hide_default_value = true)]
    pub append: String,
    /// How many vCPUs
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true)]
    pub cpus: u32,
    /// How much memory: a number with K, M or G behind it
    #[arg(long, value_name = "SIZE", default_value = "512M", allow_negative_numbers = true)]
    pub memory: Size,
    /// The PMU that the guest sees
    #[arg(long, value_enum, default_value_t = Choice::Auto)]
    pub pmu: Choice,
    /// How many of the PMU's counters the guest sees [default: as many as the host has free]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub counters: Option<u32>,
    /// Where to log what happens to the guest's counters
    #[arg(long, value_name = "FILE")]
    pub pmu_log: Option<PathBuf>,
    /// Tell what Tally does and why, and show the guest's console while a command runs; -vv and -vvv tell more
    #[arg(long, short, action = ArgAction::Count)]
    pub verbose: u8,
    /// What the default guest runs
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// The options of `tally doctor`.
#[derive(Debug, Args)]
#[command(after_help = "\
Each line is a fact: `ok`, `BAD` if it keeps guests or their counters from working, or `-` if it is good to know.
The status is 1 if one is bad.")]
pub struct Doctor {
    /// The same for machines: a list of {about, state, says, commands}
    #[arg(long)]
    pub json: bool,
}

/// The options of `tally check`.
#[derive(Debug, Args)]
#[command(after_help = "\
What is printed is meant to be pasted, wherever people compare hosts. The status is 0 if nothing is wrong, 1 if a
count is, and 125 if there is nothing to check.")]
pub struct Check {
    /// The PMU that the guests see
    #[arg(long, value_enum, default_value_t = Choice::Auto)]
    pub pmu: Choice,
    /// How many of the PMU's counters they see [default: as many as the host has free]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub counters: Option<u32>,
}

/// Answers a command line that is not to be carried out: with what was asked for (help, the version), or with one
/// line that says what is wrong with it.
pub fn refuse(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() || error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        // Should standard output be closed, nobody reads it.
        let _ = error.print();
        return if error.use_stderr() { ExitCode::from(FAILURE) } else { ExitCode::SUCCESS };
    }
    eprintln!("tally: {}", one_line(&error.render().to_string()));
    ExitCode::from(FAILURE)
}

/// The first paragraph of what clap says; the rest repeats the usage.
fn one_line(text: &str) -> String {
    let paragraph = text.split("\n\n").next().unwrap_or(text);
    let words: Vec<&str> = paragraph.split_whitespace().collect();
    format!("{} (`tally --help` tells more)", words.join(" ").trim_start_matches("error: "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(arguments: &[&str]) -> String {
        one_line(&Cli::try_parse_from(arguments).unwrap_err().render().to_string())
    }

    #[test]
    fn what_is_wrong_with_a_command_line_fits_one_line() {
        assert!(refusal(&["tally", "run", "--bogus"]).starts_with("unexpected argument '--bogus' found"));
        let unknown_pmu = refusal(&["tally", "run", "--pmu", "foo"]);
        assert!(
            unknown_pmu.contains("'foo'") && unknown_pmu.contains("amd-legacy, intel, intel-v2, kvm, none"),
            "{unknown_pmu}"
        );
        assert!(!refusal(&["tally", "run", "--memory", "12X"]).contains('\n'));
    }

    #[test]
    fn everything_behind_two_dashes_is_the_command() {
        let cli = Cli::try_parse_from(["tally", "run", "--", "perf", "--version", "--", "x"]).unwrap();
        let Command::Run(run) = cli.command else { panic!("not run") };
        assert_eq!(run.command, ["perf", "--version", "--", "x"]);
    }
}
