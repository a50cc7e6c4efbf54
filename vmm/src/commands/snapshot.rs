//! `tally snapshot`: writes a running VM into a folder.

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Result, bail};

use crate::cli::Snapshot;
use crate::commands::client;
use crate::host::{printer, signals};
use crate::run::start::snapshot::folder::Writer;

/// `tally snapshot`: the VM goes on, or ends.
pub fn snapshot(Snapshot { vm, folder, stop }: &Snapshot) -> Result<ExitCode> {
    // They end this command after it has removed what is incomplete.
    signals::block_ends()?;
    save(vm, folder, *stop)?;
    Ok(ExitCode::SUCCESS)
}

fn save(vm: &str, folder: &Path, stop: bool) -> Result<()> {
    let mut vm = client::find_one(vm)?;
    if let Some(owner) = vm.other_owner() {
        printer::say(&format_args!(
            "process {} is a VM of user {owner}, who decides what is saved",
            vm.about.pid
        ));
    }
    let mut writer = Writer::create(folder, vm.about.memory)?;
    let state = vm.begin_snapshot(stop)?;
    let mut part = Vec::new();
    while let Some(offset) = vm.next_part(&mut part)? {
        if signals::is_end_pending() {
            bail!("interrupted");
        }
        writer.put(offset, &part)?;
    }
    writer.finish(&state)?;
    if stop {
        // What was saved is complete, and continues where this VM stands still.
        vm.end()?;
    }
    Ok(())
}
