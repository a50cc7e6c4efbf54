//! `tally stat --metrics`: the metrics of all running VMs at one address, so that a host with many VMs is one target.
//!
//! Root's server asks the VMs of all users. What another user's VMs say is bounded, in time and in size, and takes
//! nothing from the metrics of others: this user's VMs come first, and each other user has a share of the answer.

use std::collections::BTreeMap;
use std::fs;
use std::process::ExitCode;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::cli::address::Address;
use crate::commands::client::{self, ClientError, Found, Vm};
use crate::protocol::exposition::{AllMetrics, Labels, VmMetrics};
use crate::protocol::printable::shorter;
use crate::protocol::socket_dir::user;
use crate::protocol::status::{Report, Summary};
use crate::run::clients::metrics::{Metrics, facts};

/// Timeout for the search and all reports: longer than a VM waits for its vCPUs, and shorter than Prometheus waits by
/// default, so that a VM that does not answer, which may be another user's, does not take the others' metrics with it.
const TIMEOUT: Duration = Duration::from_secs(9);
/// Maximum length of a name in a label, in characters.
const MAX_NAME: usize = 100;
/// Maximum size of the answer, as [`VmMetrics::size`] estimates it.
const MAX_BODY: usize = 64 << 20;
/// Maximum size of what one other user's VMs have of the answer.
const MAX_OF_ANOTHER: usize = 16 << 20;

/// Serves the metrics of all VMs that this user's commands find, until the process is ended.
pub fn serve_all(address: &Address) -> Result<ExitCode> {
    let (metrics, _socket) = Metrics::listen(address)?;
    metrics.serve(machines, || {}).context("cannot start the metrics' threads")?;
    loop {
        thread::park();
    }
}

/// Asks all VMs at once.
fn machines() -> AllMetrics {
    let end = Instant::now() + TIMEOUT;
    let Found { mut vms, silent, .. } = client::find();
    let asked = vms.len() + silent.len();
    let users = Users::read();
    let room = Room::new(user());
    // Each group has what the one before it has left.
    let others = vms.extract_if(.., |vm| vm.other_owner().is_some()).collect::<Vec<_>>();
    let answering: Vec<VmMetrics> = [vms, others]
        .into_iter()
        .flat_map(|vms| {
            let vms = vms.into_iter().map(|vm| (vm.about.pid, vm));
            client::at_once(vms, |vm| ask(vm, end, &users, &room))
        })
        // One that has just ended does not answer either.
        .filter_map(|answer| answer.ok().flatten())
        .collect();
    let silent = asked.saturating_sub(answering.len());
    AllMetrics { answering, silent: Some(silent) }
}

/// Returns what is served for a report of the VM that says so of itself.
pub fn shown(about: &Summary, report: Report) -> String {
    let machine = labelled(about, "root", report);
    AllMetrics { answering: vec![machine], silent: Some(0) }.write().expect("memory can be written")
}

/// Returns a VM's metrics, if there is room for them.
fn ask(mut vm: Vm, end: Instant, users: &Users, room: &Room) -> Result<Option<VmMetrics>, ClientError> {
    let report = vm.report_within(end.saturating_duration_since(Instant::now()))?;
    let machine = labelled(&vm.about, &users.name(vm.owner()), report);
    Ok(room.take(vm.owner(), machine.size()).then_some(machine))
}

/// Gives each metric of a VM its labels: several VMs may have the same name, and another user may give a VM any name.
fn labelled(about: &Summary, user: &str, report: Report) -> VmMetrics {
    let about =
        Summary { name: shorter(&about.name, MAX_NAME), pmu: shorter(&about.pmu, MAX_NAME), ..about.clone() };
    let (mut labels, facts): (Labels, Labels) =
        facts(&about).into_iter().partition(|(label, _)| ["name", "pid"].contains(label));
    labels.insert(0, ("user", user.to_owned()));
    VmMetrics { labels, facts, report }
}

/// The names of this host's users, from `/etc/passwd`.
struct Users(BTreeMap<u32, String>);

impl Users {
    fn read() -> Self {
        Self::of(&fs::read_to_string("/etc/passwd").unwrap_or_default())
    }

    fn of(passwd: &str) -> Self {
        let user = |line: &str| {
            let mut fields = line.split(':');
            let (name, user) = (fields.next()?, fields.nth(1)?.parse().ok()?);
            Some((user, shorter(name, MAX_NAME)))
        };
        // The first line of a user counts, as it does elsewhere.
        Self(passwd.lines().rev().filter_map(user).collect())
    }

    /// Returns the name of a user, or else the number.
    fn name(&self, user: u32) -> String {
        self.0.get(&user).cloned().unwrap_or_else(|| user.to_string())
    }
}

/// The room in an answer.
struct Room {
    /// The user whose VMs have no share, but what there is.
    user: u32,
    /// What is taken, by users.
    taken: Mutex<BTreeMap<u32, usize>>,
}

impl Room {
    fn new(user: u32) -> Self {
        Self { user, taken: Mutex::new(BTreeMap::new()) }
    }

    /// Takes room for a VM of this user's. Returns false if there is not enough.
    fn take(&self, user: u32, size: usize) -> bool {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let (all, of_user) = (taken.values().sum::<usize>(), taken.get(&user).copied().unwrap_or_default());
        let has_share = user == self.user || of_user.saturating_add(size) <= MAX_OF_ANOTHER;
        let fits = has_share && all.saturating_add(size) <= MAX_BODY;
        if fits {
            taken.insert(user, of_user + size);
        }
        fits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_metrics_of_another_users_vms_have_a_share_of_the_answer() {
        let room = Room::new(0);
        let vms = |user, size| (0..1000).filter(|_| room.take(user, size)).count();
        assert_eq!(vms(0, 1 << 20), 64, "root's are not limited but by the answer");
        assert_eq!(vms(1000, 1), 0);
        let room = Room::new(0);
        let vms = |user, size| (0..1000).filter(|_| room.take(user, size)).count();
        assert_eq!([vms(1000, 1 << 20), vms(1001, 1 << 20), vms(1000, 1)], [16, 16, 0]);
        assert!(!room.take(1002, usize::MAX));
    }

    #[test]
    fn a_user_is_called_by_the_name_that_this_host_gives() {
        let users =
            Users::of("root:x:0:0:root:/root:/bin/bash\nweb:x:1000:1000::/:\nother:x:1000::\n#\na:b:c\n");
        assert_eq!([0, 1000, 1001].map(|user| users.name(user)), ["root", "web", "1001"]);
    }

    #[test]
    fn no_vm_can_be_called_like_another_users() {
        let about = Summary {
            pid: 7,
            name: "web\",user=\"root".into(),
            runs: String::new(),
            pmu: String::new(),
            leaves_out_entries: false,
            cpus: 1,
            memory: 0,
            started: 0,
            age: 0.0,
        };
        let machine = labelled(&about, "mallory", Report { stands_still: false, vcpus: Vec::new() });
        let text = AllMetrics { answering: vec![machine], silent: None }.write().unwrap();
        let line = "tally_stands_still{user=\"mallory\",name=\"web\\\",user=\\\"root\",pid=\"7\"} 0";
        assert!(text.lines().any(|found| found == line), "{text}");
    }
}
