//! The command `tally`: a KVM virtual machine monitor whose guests are to be measured.
//!
//! From the command line ([`cli`]) a run goes through [`run`], which builds a machine (the crate `tally_machine`) and
//! waits in its event loop while the machine's threads run the guest. The other [`commands`] are the operator's: they
//! look at the host, or at VMs that run, over the socket that each has. What both say is in [`protocol`].
//!
//! All of it is a library, so that the fuzz targets can reach what reads the bytes of others ([`untrusted`]). The
//! program is [`main`] alone.

mod arch;
mod cli;
mod commands;
mod host;
mod protocol;
mod run;
mod sandbox;
pub mod untrusted;

use std::env;
use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;

use anyhow::{Context, Result};
use clap::Parser;

use cli::{Cli, Command};
use commands::{change, check, doctor, manual, record, snapshot, stat, top};
use host::{lab, printer, terminal};
use protocol::ending::FAILURE;
use run::clients::control;
use run::event_log::EventLog;
use run::{inherited, logging};

/// Runs the command line. Returns the status of the process.
pub fn main() -> ExitCode {
    install_panic_hook();
    let arguments: Vec<OsString> = env::args_os().collect();
    let cli = match Cli::try_parse_from(&arguments) {
        Ok(cli) => cli,
        Err(error) => return cli::refuse(&error),
    };
    let inherited = match &cli.command {
        Command::Run(_) => inherited::close(&arguments),
        _ => Ok(()),
    };
    let result = inherited.and_then(|()| init_logging(&cli.command)).and_then(|log| match &cli.command {
        Command::Run(options) => run::run(options, log.as_ref()),
        Command::Log(options) => commands::log::log(options),
        Command::List(options) => stat::list(options),
        Command::Stat(options) => stat::stat(options),
        Command::Record(options) => record::record(options),
        Command::Top(options) => top::top(options),
        Command::Symbols(options) => record::symbols(options),
        Command::Snapshot(options) => snapshot::snapshot(options),
        Command::Policy(options) => change::change_policy(options),
        Command::Doctor(options) => doctor::doctor(options),
        Command::Check(options) => {
            let format = if options.json { check::Format::Json } else { check::Format::Text };
            check::check(options.pmu, options.counters, format)
        }
        Command::Lab { arguments } => lab::run(&[], arguments),
        Command::Bench { arguments } => lab::run(&["bench"], arguments),
        Command::Completions { shell } => manual::completions(*shell),
        Command::Man { folder } => manual::manual(folder.as_deref()),
    });
    let status = result.unwrap_or_else(|error| {
        printer::say(&format_args!("{error:#}"));
        ExitCode::from(FAILURE)
    });
    vpmu_perf::broker::end();
    status
}

/// Opens the event log, if requested, and installs the logger.
fn init_logging(command: &Command) -> Result<Option<Arc<EventLog>>> {
    let (verbosity, path, size) = match command {
        Command::Run(options) => (options.verbose, options.pmu_log.as_deref(), options.pmu_log_size),
        _ => (0, None, 0),
    };
    let create =
        |path| EventLog::create(path, size).with_context(|| format!("{}: cannot be written", path.display()));
    let log = path.map(create).transpose()?.map(Arc::new);
    logging::begin(verbosity, log.clone());
    Ok(log)
}

/// Installs a panic hook: a panic in any thread prints one line and exits with FAILURE.
fn install_panic_hook() {
    std::panic::set_hook(Box::new(|info| {
        terminal::restore();
        if thread::current().name() == Some("main") {
            // The filters of other threads may not let them. Clients remove the socket of a process that has ended.
            control::remove_socket();
        }
        let place = info.location().map_or_else(String::new, |place| format!(" at {place}"));
        let what = info.payload_as_str().unwrap_or("no message");
        printer::say(&format_args!("internal error{place}: {what}"));
        log::logger().flush();
        // SAFETY: takes no pointer, and runs nothing of ours: another thread may be anywhere.
        unsafe { libc::_exit(FAILURE.into()) };
    }));
}
