//! The first stage of a run: everything is found, opened and checked. Nothing is changed yet that has to be restored
//! at the end.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use log::info;
use tally_machine::kvm::{MAX_CPUS, check_cpus, raise_file_limit};
use tally_machine::pmu::{self, Offer, offer};
use tally_machine::target::COUNTERS;
use tally_machine::{EmptyMachine, GuestRam, Machine, block_exit_signals};
use vpmu::policy::Policy;

use super::assembled::{self, AgentLink, Assembled, ClientServices, Surroundings};
use super::host_resources::{self, HostResources};
use super::started::ClientSockets;
use crate::cli::Run;
use crate::cli::policy;
use crate::host::entry_ticks::Entries;
use crate::host::kvm::{self, MediatedPmu, SYS_MODULE};
use crate::host::signals;
use crate::protocol::ending::Reporter;
use crate::run::clients::metrics::{Metrics, Socket};
use crate::run::clients::snapshots::SnapshotService;
use crate::run::event_log::EventLog;
use crate::run::event_loop::EventLoop;
use crate::run::flamegraph::FlameGraph;
use crate::run::signal_thread::Signals;
use crate::run::start::snapshot::Opened;
use crate::run::start::source::{Blueprint, BuiltMachine, MachineParts, Source};
use crate::run::streams::agent::AgentPauser;
use crate::run::streams::console::Flusher;
use crate::sandbox;

/// Everything that a machine is built from.
pub struct Prepared<'a> {
    blueprint: Blueprint<'a>,
    source: Source,
    machine: EmptyMachine,
    ram: GuestRam,
    resources: HostResources,
    /// Remarks for the user about the PMU.
    remarks: Vec<String>,
    metrics: Option<(Metrics, Socket)>,
    graph: Option<FlameGraph>,
}

impl<'a> Prepared<'a> {
    /// Opens and checks everything that the options name.
    pub fn new(options: &'a Run, saved: Option<Opened>) -> Result<Self> {
        let policy = policy(options, saved.as_ref())?;
        signals::ignore_sigxfsz();
        raise_file_limit();
        // Before KVM is opened, which gives this process threads of its own.
        sandbox::broker::start(options.sandbox, options.cpus.min(MAX_CPUS))?;
        let kvm = kvm::open(options.pmu)?;
        let cpus = check_cpus(&kvm, options.cpus)?;
        let ram = Machine::memory(&options.memory)?;
        info!("guest: {ram}; vCPUs: {cpus}");
        let metrics = options.metrics.as_ref().map(Metrics::listen).transpose()?;
        let resources = host_resources::devices(options)?;
        let graph = options.flamegraph.as_deref().map(FlameGraph::new).transpose()?;
        let processor = pmu::processor();
        let Offer { mut pmu, remarks } = match &saved {
            Some(saved) => saved.state.setup.pmu.offer(processor, &policy)?,
            None => offer(options.pmu, options.counters, processor, &policy)?,
        };
        let name = options.pmu.name();
        let mediated = MediatedPmu::find(Path::new(SYS_MODULE))
            .map_or(String::new(), |mediated| format!(" where {mediated}"));
        info!(target: COUNTERS, "PMU: the guest sees {pmu} (--pmu {name}, on a host with {processor}{mediated})");
        Entries::leave_out(&mut pmu).tell();
        let machine = Machine::empty(&kvm)?;
        let blueprint = Blueprint { options, kvm, cpus, processor, pmu, policy };
        let source = blueprint.source(saved)?;
        Ok(Self { blueprint, source, machine, ram, resources, remarks, metrics, graph })
    }

    /// Builds the machine. From here on, signals are blocked in this thread and in all threads that it starts, and are
    /// handled by the event loop.
    pub fn assemble(self, log: Option<&'a Arc<EventLog>>) -> Result<Assembled<'a>> {
        let Self { blueprint, source, machine, ram, resources, remarks, metrics, graph } = self;
        let HostResources { devices, threads: device_threads, setup } = resources;
        let options = blueprint.options;
        let memory = ram.size();

        sandbox::begin(options.sandbox).map_err(|error| anyhow!(sandbox::refusal(&error)))?;
        block_exit_signals().context("cannot block signals")?;
        let signals = Signals::start().context("cannot start the signal thread")?;
        let (reporter, endings) = Reporter::new().context("cannot make the event loop")?;
        let mut events = EventLoop::default();
        events.add(endings);
        let (output, timer) = assembled::console(options).context("cannot prepare the console")?;
        events.add(Flusher::new(timer, output.clone()));

        let BuiltMachine { machine, saver, agent, phase } =
            blueprint.build(MachineParts { machine, devices, output: &output }, source, ram)?;
        let template_destination = blueprint.destination();
        let (agent_pauser, pause_requests) = agent.is_some().then(AgentPauser::new).transpose()?.unzip();
        let Blueprint { kvm, pmu, policy, .. } = blueprint;
        let (mut client_sockets, mut template) = (ClientSockets::default(), None);
        if let Some(destination) = template_destination {
            // A guest that becomes a template is nobody's.
            template = Some((destination, saver));
        } else {
            let snapshots =
                SnapshotService::new(options, kvm, pmu, &policy, saver, agent_pauser, reporter.clone());
            let clients = ClientServices { options, pmu, policy, memory, log, metrics, snapshots };
            client_sockets = clients.serve(&machine)?;
        }
        let agent = agent.zip(pause_requests);
        let agent = agent.map(|(console, pause_requests)| AgentLink {
            console,
            pause_requests,
            phase,
            setup,
            template,
        });
        let surroundings = Surroundings { client_sockets, signals, events, reporter, output };
        let offer = Offer { pmu, remarks };
        Ok(Assembled { options, log, offer, machine, device_threads, agent, graph, surroundings })
    }
}

/// Returns the policy for the guest's counters. `--on-starvation` overrides the file of `--pmu-policy`, and both
/// override the policy of a guest that was saved.
fn policy(options: &Run, saved: Option<&Opened>) -> Result<Policy> {
    let option = match (&options.pmu_policy, options.on_starvation) {
        (Some(_), _) => Some("--pmu-policy"),
        (None, Some(_)) => Some("--on-starvation"),
        (None, None) => None,
    };
    if let Some(option) = option.filter(|_| !options.pmu.is_emulated()) {
        bail!("{option} is for Tally's own PMUs, not for --pmu {}", options.pmu.name());
    }
    let saved = || saved.map(|saved| saved.state.setup.policy.clone()).unwrap_or_default();
    let policy = options.pmu_policy.as_deref().map(policy::of_file).transpose()?.unwrap_or_else(saved);
    Ok(match options.on_starvation {
        Some(on_starvation) => Policy { on_starvation, ..policy },
        None => policy,
    })
}
