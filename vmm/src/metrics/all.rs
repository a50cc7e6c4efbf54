//! `tally stat --metrics`: the metrics of all running VMs at one address, so that a host with many VMs is one target.

use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};

use super::exposition::{Labels, Machine, Machines};
use super::{Address, Metrics, facts};
use crate::control::client::{self, ClientError, Found, Vm};
use crate::status::Report;

/// Timeout for a VM's report: longer than a VM waits for its vCPUs. With the time for greetings it is shorter than
/// Prometheus waits by default, so that a VM that does not answer, which may be another user's, does not take the
/// others' metrics with it.
const TIMEOUT: Duration = Duration::from_secs(6);

/// Serves the metrics of all VMs that this user's commands find, until the process is ended.
pub fn serve_all(address: &Address) -> Result<ExitCode> {
    let (metrics, _socket) = Metrics::listen(address)?;
    metrics.serve(machines, || {}).context("cannot start the metrics' threads")?;
    loop {
        thread::park();
    }
}

/// Asks all VMs at once.
fn machines() -> Machines {
    let Found { vms, silent } = client::find();
    let asked = vms.len() + silent.len();
    let answers = client::at_once(vms.into_iter().map(|vm| (vm.about.pid, vm)), ask);
    // One that has just ended does not answer either.
    let answering: Vec<Machine> = answers.into_iter().flatten().collect();
    let silent = asked.saturating_sub(answering.len());
    Machines { answering, silent: Some(silent) }
}

/// Returns what is served for a VM's report.
pub fn shown(report: Report) -> String {
    let machine = Machine { labels: Labels::new(), facts: Labels::new(), report };
    Machines { answering: vec![machine], silent: Some(0) }.write().expect("memory can be written")
}

fn ask(mut vm: Vm) -> Result<Machine, ClientError> {
    let report = vm.report_within(TIMEOUT)?;
    // Several VMs may have the same name.
    let (labels, facts) =
        facts(&vm.about).into_iter().partition(|(label, _)| ["name", "pid"].contains(label));
    Ok(Machine { labels, facts, report })
}
