//! `tally log`: adds a note to the event log of a running VM, or shows the event log that one has left.

mod files;
pub mod read;
mod show;
mod summary;
mod words;

use std::process::ExitCode;

use anyhow::Result;

use crate::cli::Log;
use crate::commands::client;
use crate::protocol::message::Request;
use show::show;
pub use show::{Part, show_bytes};

/// `tally log`: prints a log, writes a note into a running VM's log, or flushes that.
pub fn log(options: &Log) -> Result<ExitCode> {
    match (&options.show, &options.vm) {
        (Some(file), _) => show(file, if options.summary { Part::Summary } else { Part::All })?,
        (None, Some(vm)) => client::find_one(vm)?.request(&Request::Log(options.text.clone()))?,
        (None, None) => {}
    }
    Ok(ExitCode::SUCCESS)
}
