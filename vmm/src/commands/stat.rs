//! `tally list` and `tally stat`: show running VMs from outside. What is shown is described in
//! [`crate::protocol::status`]; this module renders it.

mod text;

#[cfg(test)]
mod tests;

use std::io::Write;
use std::process::ExitCode;
use std::thread;

use anyhow::Result;
use serde::Serialize;

use crate::cli::policy;
use crate::cli::{List, Stat};
use crate::commands::client::{self, ClientError, Found, Vm};
use crate::commands::doctor::holders;
use crate::commands::live::{self, Looked, unless_closed};
use crate::commands::metrics_of_all;
use crate::host::printer;
use crate::protocol::message::Answer;
use crate::protocol::printable::short;
use crate::protocol::status::{Summary, VmStatus};
use text::aligned;

/// `tally list`: prints the running VMs.
pub fn list(options: &List) -> Result<ExitCode> {
    let Found { vms, silent, .. } = client::find();
    let abouts: Vec<Summary> = vms.into_iter().map(|vm| vm.about).collect();
    let text = if options.json { text::json(&abouts)? } else { listed(&abouts).join("\n") };
    unless_closed(writeln!(printer::out(), "{text}"))?;
    for error in silent {
        printer::say(&error);
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns what `tally list`, `tally stat` and `tally policy` print for a VM's answer, as text and as JSON, and what
/// `tally stat --metrics` serves for it if the VM is this one.
pub fn shown(about: &Summary, answer: &Answer) -> String {
    let (mut lines, json) = match answer {
        Answer::Hello(about) => {
            let abouts = [about.clone()];
            (listed(&abouts), text::json(&abouts))
        }
        Answer::Status(status) => (text::lines(status), text::json(status)),
        Answer::Policy(policy) => return policy::toml(policy),
        Answer::Report(report) => return metrics_of_all::shown(about, report.clone()),
        Answer::Done
        | Answer::Snapshot(_)
        | Answer::Recording(_)
        | Answer::Samples(_)
        | Answer::Recorded(_)
        | Answer::Functions(_)
        | Answer::Symbols(_)
        | Answer::Error(_) => return String::new(),
    };
    lines.extend(json);
    lines.join("\n")
}

/// Renders `tally list`'s table.
fn listed(vms: &[Summary]) -> Vec<String> {
    const WORDS: [usize; 3] = [1, 5, 6];
    let title = ["process", "name", "vCPUs", "memory", "age", "PMU", "runs"].map(str::to_owned).to_vec();
    let row = |vm: &Summary| {
        let (memory, age) = (text::size(vm.memory), text::age(vm.age));
        let row = [&vm.pid.to_string(), &vm.name, &vm.cpus.to_string(), &memory, &age, &vm.pmu, &vm.runs];
        row.map(|cell| short(cell)).to_vec()
    };
    let rows: Vec<Vec<String>> = std::iter::once(title).chain(vms.iter().map(row)).collect();
    aligned(&rows, &WORDS)
}

/// `tally stat`: shows the counters and exits of running VMs.
pub fn stat(options: &Stat) -> Result<ExitCode> {
    if let Some(address) = &options.metrics {
        return metrics_of_all::serve_all(address);
    }
    let say = |error| printer::say(&error);
    let vms = match &options.vm {
        Some(who) => vec![client::find_one(who)?],
        None => client::find().answering(say)?,
    };
    // The first request begins the interval of the second.
    let mut vms = {
        let vms = vms.into_iter().map(|vm| (vm.about.pid, vm));
        client::some_of(client::at_once(vms, |mut vm| vm.status().map(|_| vm)), say)?
    };
    if options.json {
        thread::sleep(options.interval);
        let vms = client::some_of(statuses(&mut vms), say)?;
        unless_closed(writeln!(printer::out(), "{}", text::json(&Document { vms })?))?;
        return Ok(ExitCode::SUCCESS);
    }
    live::show(options.interval, options.count, &mut || look_at(&mut vms))
}

/// The document that `--json` prints.
#[derive(Serialize)]
struct Document {
    vms: Vec<VmStatus>,
}

fn statuses(vms: &mut [Vm]) -> Vec<Result<VmStatus, ClientError>> {
    client::at_once(vms.iter_mut().map(|vm| (vm.about.pid, vm)), status)
}

/// Returns a VM's status, with those who may hold the counters that others hold.
fn status(vm: &mut Vm) -> Result<VmStatus, ClientError> {
    let mut status = vm.status()?;
    let process = status.about.pid;
    let held = status.vcpus.iter_mut().filter_map(|vcpu| vcpu.hardware.as_mut()).filter(|one| one.others > 0);
    let mut holders = None;
    for hardware in held {
        hardware.holders.clone_from(holders.get_or_insert_with(|| holders::beside(process)));
    }
    Ok(status)
}

/// Looks at all VMs, and removes those that do not answer.
fn look_at(vms: &mut Vec<Vm>) -> Looked {
    let (mut blocks, mut gone) = (Vec::new(), Vec::new());
    let mut answers = statuses(vms).into_iter();
    vms.retain(|_| match answers.next() {
        Some(Ok(status)) => {
            blocks.push(text::lines(&status));
            true
        }
        Some(Err(error)) => {
            gone.push(error);
            false
        }
        None => false,
    });
    Looked { lines: blocks.join(&String::new()), gone, more: !vms.is_empty() }
}
