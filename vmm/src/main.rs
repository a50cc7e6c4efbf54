//! The command `tally`: a KVM virtual machine monitor whose guests are to be measured.
//!
//! From the command line ([`cli`]) a run goes through [`run`], which has a machine put together ([`vm`]) and waits
//! in the event loop ([`events`]) while a thread for each vCPU ([`vcpu`]) runs the guest.

mod acpi;
mod cli;
mod console;
mod cpuid;
mod events;
mod firmware;
mod kvm;
mod lab;
mod loader;
mod machine;
mod memory;
mod pmu;
mod registers;
mod run;
mod signals;
mod terminal;
mod vcpu;
mod vm;

use std::process::ExitCode;

use clap::Parser;

use cli::{Cli, Command};

/// The status of Tally's own failures, so that they cannot be taken for a command's.
const FAILURE: u8 = 125;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return cli::refuse(&error),
    };
    let result = match &cli.command {
        Command::Run(options) => run::run(options),
        Command::Lab { arguments } => lab::run(arguments),
    };
    result.unwrap_or_else(|error| {
        eprintln!("tally: {error:#}");
        ExitCode::from(FAILURE)
    })
}
