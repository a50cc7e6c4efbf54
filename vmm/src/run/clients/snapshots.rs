//! Saves a VM while it runs, for `tally snapshot`. The command's streams pause first, then the vCPUs, then the
//! devices.

use std::io::{self, BufRead, Write};
use std::sync::{Mutex, TryLockError};

use kvm_ioctls::Kvm;
use log::info;
use tally_machine::pmu::{Pmu, SavedPmu};
use tally_machine::{PageMap, PausedMachine, Saver};
use vpmu::policy::Policy;

use crate::cli::Run;
use crate::protocol::ending::{Ending, Reporter};
use crate::protocol::message::{self, Answer, Request};
use crate::protocol::stream;
use crate::run::start::snapshot::{GuestState, Setup};
use crate::run::streams::agent::{AgentPauser, PausedAgent};

/// What saving a VM needs, opened before the process confines itself.
pub struct SnapshotSaver {
    kvm: Kvm,
    machine: Saver,
    /// Stops the thread of the command's streams, if there is one.
    agent: Option<AgentPauser>,
    setup: Setup,
    pmu: Pmu,
    pages: PageMap,
    reporter: Reporter,
}

/// A VM that can be saved, by one client at a time; or why it cannot be.
pub struct SnapshotService(Result<Mutex<SnapshotSaver>, String>);

/// A VM that is paused.
struct PausedVm<'a> {
    agent: Option<PausedAgent>,
    machine: PausedMachine<'a>,
}

impl SnapshotService {
    /// Prepares to save a VM with these options.
    pub fn new(
        options: &Run,
        kvm: Kvm,
        pmu: Pmu,
        policy: &Policy,
        saver: Saver,
        agent: Option<AgentPauser>,
        reporter: Reporter,
    ) -> Self {
        let prepare = || {
            let saved_pmu = SavedPmu::of(pmu).ok_or("the counters of --pmu kvm cannot be saved")?;
            if options.flamegraph.is_some() {
                return Err("a run with --flamegraph cannot be saved".to_owned());
            }
            let setup =
                Setup::new(options, saved_pmu, policy.clone()).map_err(|error| format!("{error:#}"))?;
            let pages = PageMap::open().map_err(|error| format!("/proc/self/pagemap: {error}"))?;
            Ok(Mutex::new(SnapshotSaver { kvm, machine: saver, agent, setup, pmu, pages, reporter }))
        };
        Self(prepare())
    }

    /// Sends a snapshot with the policy of this time. If the VM is to end afterwards, waits for the client's next
    /// request.
    pub fn send(
        &self,
        stop: bool,
        policy: Policy,
        requests: &mut impl BufRead,
        answers: &mut impl Write,
    ) -> io::Result<()> {
        let refuse = |answers: &mut _, why: &str| message::send(answers, &Answer::Error(why.to_owned()));
        let saver = match &self.0 {
            Err(why) => return refuse(answers, why),
            Ok(saver) => match saver.try_lock() {
                Ok(saver) => saver,
                Err(TryLockError::Poisoned(error)) => error.into_inner(),
                Err(TryLockError::WouldBlock) => return refuse(answers, "it is being saved already"),
            },
        };
        let (paused, state) = match saver.pause(policy) {
            Ok(paused) => paused,
            Err(why) => return refuse(answers, &why),
        };
        info!("the machine stands still while it is saved");
        message::send(answers, &Answer::Snapshot(state.len() as u64))?;
        stream::send(&mut *answers, &state, &saver.machine.ram, &saver.pages)?;
        if stop && matches!(message::receive(requests), Ok(Some(Request::End))) {
            // Once its end is reported, this process may be gone before it answers.
            let answered = message::send(answers, &Answer::Done);
            saver.reporter.report(Ending::Saved);
            paused.never_go_on();
            return answered;
        }
        Ok(())
    }
}

impl SnapshotSaver {
    /// Pauses the VM, and returns its state. The error is why it cannot be saved now.
    fn pause(&self, policy: Policy) -> Result<(PausedVm<'_>, Vec<u8>), String> {
        let agent = self.agent.as_ref().map(AgentPauser::pause).transpose()?;
        let machine = self.machine.pause().map_err(|error| error.to_string())?;
        let saved = machine.save().map_err(|error| error.to_string())?;
        let state = GuestState {
            setup: self.setup.with(policy),
            processor: saved.processor(&self.kvm, self.pmu).map_err(|error| error.to_string())?,
            machine: saved,
            agent: agent.as_ref().map(|agent| agent.state.clone()),
        };
        let state = serde_json::to_vec(&state).map_err(|error| error.to_string())?;
        Ok((PausedVm { agent, machine }, state))
    }
}

impl PausedVm<'_> {
    /// Leaves the VM as it is until the process ends.
    fn never_go_on(self) {
        if let Some(agent) = self.agent {
            agent.end();
        }
        std::mem::forget(self.machine);
    }
}
