//! `tally run`: builds a machine from the options, waits for its end, and turns that into an exit status.
//!
//! A run has four stages. Each is a type that is created from the one before: [`Prepared`], `Assembled`, `Started`,
//! `Ended`.

mod assembled;
pub mod clients;
pub mod event_log;
pub mod event_loop;
pub mod flamegraph;
mod gate;
mod host_resources;
pub mod inherited;
pub mod logging;
pub mod lost_memory;
pub mod network;
mod prepared;
mod root;
pub mod signal_thread;
pub mod signals;
pub mod start;
mod started;
pub mod streams;
mod talk;

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Result;

use crate::cli::Run;
use crate::run::event_log::EventLog;
use crate::run::start::snapshot::{self, Opened};

use prepared::Prepared;

/// `tally run`: boots a guest and waits for its end.
pub fn run(options: &Run, log: Option<&Arc<EventLog>>) -> Result<ExitCode> {
    let Some(folder) = &options.restore else { return start(&*root::resolved(options)?, None, log) };
    let saved = snapshot::open(folder)?;
    start(&saved.state.setup.options(options), Some(saved), log)
}

fn start(options: &Run, saved: Option<Opened>, log: Option<&Arc<EventLog>>) -> Result<ExitCode> {
    let stages = || Prepared::new(options, saved)?.assemble(log)?.start()?.wait()?.conclude();
    let result = stages();
    if let Err(error) = &result {
        started::close(log, &format_args!("{error:#}"));
    }
    result
}
