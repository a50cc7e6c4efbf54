//! `tally list` and `tally stat`: the operator's view of the VMs that run, from outside.

mod document;
mod live;
mod text;

#[cfg(test)]
mod tests;

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::Result;
use serde::Serialize;

use crate::cli::{List, Stat};
use crate::control::client::{self, ClientError, Found, Vm};
use crate::control::message::Snapshot;
use crate::stderr;
use document::{AboutDocument, VmDocument};
use text::{aligned, printable};

/// Prints which VMs run.
pub fn list(options: &List) -> Result<ExitCode> {
    let Found { vms, silent } = client::find();
    let abouts: Vec<AboutDocument> = vms.into_iter().map(|vm| vm.about.into()).collect();
    let mut out = io::stdout().lock();
    if options.json {
        writeln!(out, "{}", serde_json::to_string(&abouts)?)?;
    } else {
        for line in listed(&abouts) {
            writeln!(out, "{line}")?;
        }
    }
    for error in silent {
        stderr::say(&error);
    }
    Ok(ExitCode::SUCCESS)
}

fn listed(vms: &[AboutDocument]) -> Vec<String> {
    const WORDS: [usize; 3] = [1, 5, 6];
    let title = ["process", "name", "vCPUs", "memory", "age", "PMU", "runs"].map(str::to_owned).to_vec();
    let row = |vm: &AboutDocument| {
        let (memory, age) = (text::size(vm.memory), text::age(vm.age));
        let row = [&vm.pid.to_string(), &vm.name, &vm.cpus.to_string(), &memory, &age, &vm.pmu, &vm.runs];
        row.map(|cell| printable(cell)).to_vec()
    };
    let rows: Vec<Vec<String>> = std::iter::once(title).chain(vms.iter().map(row)).collect();
    aligned(&rows, &WORDS)
}

/// Prints how VMs do.
pub fn stat(options: &Stat) -> Result<ExitCode> {
    let say = |error| stderr::say(&error);
    let vms = match &options.vm {
        Some(who) => vec![client::find_one(who)?],
        None => client::find().answering(say)?,
    };
    let mut watched = client::some_of(vms.into_iter().map(Watched::new), say)?;
    if options.json {
        thread::sleep(options.interval);
        let vms = client::some_of(watched.iter_mut().map(Watched::look), say)?;
        writeln!(io::stdout(), "{}", serde_json::to_string(&Document { vms })?)?;
        return Ok(ExitCode::SUCCESS);
    }
    if io::stdout().is_terminal() && options.count.is_none() {
        return live::show(watched, options.interval);
    }
    match print(watched, options.interval, options.count) {
        // Who has read enough has what they want.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// Prints so often, or until no VM is left.
fn print(mut watched: Vec<Watched>, interval: Duration, count: Option<u32>) -> io::Result<()> {
    let mut out = io::stdout().lock();
    for round in 0.. {
        thread::sleep(interval);
        if round > 0 && !watched.is_empty() {
            writeln!(out)?;
        }
        let Looked { lines, gone } = look_at(&mut watched);
        for line in lines {
            writeln!(out, "{line}")?;
        }
        out.flush()?;
        for error in gone {
            stderr::say(&error);
        }
        if watched.is_empty() || count.is_some_and(|count| round + 1 >= count) {
            break;
        }
    }
    Ok(())
}

/// What `--json` prints.
#[derive(Serialize)]
struct Document {
    vms: Vec<VmDocument>,
}

/// What was found at a look at all VMs.
struct Looked {
    /// What there is to show of them, one after the other.
    lines: Vec<String>,
    /// Why some are not looked at any more.
    gone: Vec<ClientError>,
}

fn look_at(watched: &mut Vec<Watched>) -> Looked {
    let (mut blocks, mut gone) = (Vec::new(), Vec::new());
    watched.retain_mut(|vm| match vm.look() {
        Ok(document) => {
            blocks.push(text::lines(&document));
            true
        }
        Err(error) => {
            gone.push(error);
            false
        }
    });
    Looked { lines: blocks.join(&String::new()), gone }
}

/// A VM, and how it was when it was last looked at.
struct Watched {
    vm: Vm,
    before: Snapshot,
}

impl Watched {
    fn new(mut vm: Vm) -> Result<Self, ClientError> {
        let before = vm.look()?;
        Ok(Self { vm, before })
    }

    /// How it does, and what it did since the last time.
    fn look(&mut self) -> Result<VmDocument, ClientError> {
        let now = self.vm.look()?;
        let document = VmDocument::new(now.clone(), &self.before);
        self.before = now;
        Ok(document)
    }
}
