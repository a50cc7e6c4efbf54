//! The command line. Other people's scripts depend on it.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::memory::Size;
use crate::pmu::Pmu;

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
With COMMAND, the default guest runs it; its output and status become Tally's. Without, the guest's console is on the
terminal: Ctrl-A X ends the machine. Failures of Tally itself have status 125.

Examples:
  tally run -- perf stat -e task-clock true
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
    #[arg(long, value_enum, default_value_t = Pmu::None)]
    pub pmu: Pmu,
    /// Show the guest's console on standard error while a command runs
    #[arg(long, short)]
    pub verbose: bool,
    /// What the default guest runs
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}
