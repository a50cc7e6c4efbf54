//! The second stage of a run: the machine is built and clients can connect to it, but its vCPUs do not run yet.

use std::io;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result};
use devices::virtio::Console;
use log::warn;
use tally_machine::pmu::{Offer, Pmu};
use tally_machine::target::COUNTERS;
use tally_machine::{Journal, Machine, Saver, Vcpu};
use vpmu::policy::Policy;

use super::gate::Gate;
use super::host_resources::{DeviceThread, GuestSetup};
use super::started::{ClientSockets, Guards, Started};
use crate::cli::Run;
use crate::host::terminal::Raw;
use crate::host::terminal::standard_stream;
use crate::protocol::ending::{Ending, Reporter};
use crate::protocol::status::Summary;
use crate::run::clients::control::Control;
use crate::run::clients::metrics::{self, Metrics, Socket};
use crate::run::clients::running::{self, Running};
use crate::run::clients::snapshots::SnapshotService;
use crate::run::event_log::{EventLog, VcpuLog};
use crate::run::event_loop::EventLoop;
use crate::run::flamegraph::FlameGraph;
use crate::run::signal_thread::Signals;
use crate::run::signals::SignalHandler;
use crate::run::start::source::GuestPhase;
use crate::run::start::template::{self, TemplateDestination};
use crate::run::streams::agent::PauseRequests;
use crate::run::streams::choose;
use crate::run::streams::console::{FlushTimer, Output};
use crate::run::streams::console_input::ConsoleInput;
use crate::run::talk::AgentStart;
use crate::sandbox::{self, Confinement};

/// A machine whose vCPUs do not run yet, and everything that a running machine needs.
pub struct Assembled<'a> {
    pub options: &'a Run,
    pub log: Option<&'a Arc<EventLog>>,
    /// The PMU, and remarks for the user about it.
    pub offer: Offer,
    pub machine: Machine,
    /// The threads of the machine's devices.
    pub device_threads: Vec<DeviceThread>,
    /// What the agent needs, if the guest has an agent.
    pub agent: Option<AgentLink>,
    pub graph: Option<FlameGraph>,
    pub surroundings: Surroundings,
}

/// The host's side of the agent, before it is started.
pub struct AgentLink {
    /// The agent's device.
    pub console: Console,
    /// The end of the agent's thread by which it is paused.
    pub pause_requests: PauseRequests,
    /// What the guest does when it first runs here.
    pub phase: GuestPhase,
    /// What the agent sets up before it runs the command.
    pub setup: GuestSetup,
    /// Where the guest is saved when it waits for its command, instead of running it, and what saves it.
    pub template: Option<(TemplateDestination, Saver)>,
}

/// What this process has around the machine.
pub struct Surroundings {
    pub client_sockets: ClientSockets,
    pub signals: Signals,
    pub events: EventLoop<Ending>,
    pub reporter: Reporter,
    /// The console's output.
    pub output: Output,
}

impl<'a> Assembled<'a> {
    /// Connects to the agent or to the input from the terminal, and then starts the devices and the vCPUs.
    pub fn start(self) -> Result<Started<'a>> {
        let Self { options, log, offer, machine, device_threads, agent, mut graph, surroundings } = self;
        let Surroundings { client_sockets, signals, mut events, reporter, output } = surroundings;
        let (mut handle, mut thread, mut raw) = (None, None, None);
        if let Some((link, transport)) = agent.zip(machine.external_transport) {
            let AgentLink { console, pause_requests, phase, setup, template } = link;
            let save =
                template.map(|(destination, saver)| template::save_into(destination, saver)).transpose()?;
            let agent = AgentStart { command: &options.command, setup, graph: graph.as_mut(), phase, save };
            let started = agent.start(console, transport, pause_requests, reporter.clone())?;
            (handle, thread, raw) = (Some(started.handle), Some(started.thread), started.raw);
        }
        events.add(SignalHandler::new(signals, handle));
        if options.command.is_empty() {
            let input = choose::for_console().context("cannot prepare the console's input")?;
            events.add(ConsoleInput::new(input, machine.console, machine.console_room));
            raw = Raw::enter().context("cannot make the terminal raw")?;
        }
        let Offer { pmu, remarks } = offer;
        for remark in remarks {
            warn!(target: COUNTERS, "{remark}");
        }
        for (device, DeviceThread { name, kind, reach }) in
            machine.device_servers.into_iter().zip(device_threads)
        {
            sandbox::spawn(name, kind, reach, || device.run()).context("cannot start a device's thread")?;
        }
        if let Some(log) = log {
            log.start_thread().context("cannot start the log's thread")?;
        }
        let confinement = Arc::new(Confinement::new(sandbox::Thread::Vcpu, Vec::new()));
        // The vCPUs and this thread.
        let gate = Arc::new(Gate::new(machine.vcpus.len() + 1));
        for vcpu in machine.vcpus {
            let journal = log.map(|log| VcpuLog::new(Arc::clone(log), vcpu.id, pmu));
            let (confinement, gate) = (Arc::clone(&confinement), Arc::clone(&gate));
            let confine = move || {
                confinement.enter();
                gate.arrive();
                gate.wait();
            };
            run(vcpu, journal, reporter.clone(), confine)?;
        }
        let mut reach = client_sockets.reach();
        if let Some(graph) = &graph {
            reach.extend(graph.reach()?);
        }
        Confinement::new(sandbox::Thread::Main, reach).enter();
        gate.arrive();
        Ok(Started {
            options,
            log,
            guards: Guards { client_sockets, events, raw },
            output,
            agent: thread,
            graph,
        })
    }
}

/// Starts the thread of a vCPU, which is confined before the guest runs.
fn run(
    vcpu: Vcpu,
    journal: Option<VcpuLog>,
    reporter: Reporter,
    confine: impl FnOnce() + Send + 'static,
) -> Result<()> {
    let name = format!("vcpu{}", vcpu.id);
    let work = move || {
        let journal = journal.map(|journal| Box::new(journal) as Box<dyn Journal>);
        reporter.report(vcpu.run(journal, confine).map_or_else(Ending::Failed, Ending::Guest));
    };
    thread::Builder::new().name(name).spawn(work).context("cannot start a vCPU's thread").map(drop)
}

/// Returns the destination of the console's output, and its timer. While a command runs, the console is shown with `-v`
/// only; its last lines are kept in case the guest dies.
pub fn console(options: &Run) -> io::Result<(Output, Arc<FlushTimer>)> {
    let timer = Arc::new(FlushTimer::new()?);
    let file = match (options.command.is_empty(), options.verbose > 0) {
        (true, _) => Some(standard_stream(&io::stdout())?),
        (false, true) => Some(standard_stream(&io::stderr())?),
        (false, false) => None,
    };
    let output = Output::new(file, Arc::clone(&timer));
    if !options.command.is_empty() && options.verbose == 0 {
        output.keep_tail();
    }
    Ok((output, timer))
}

/// What clients are told of a VM, and what they may do with it.
pub struct ClientServices<'a> {
    pub options: &'a Run,
    pub pmu: Pmu,
    pub policy: Policy,
    pub memory: u64,
    pub log: Option<&'a Arc<EventLog>>,
    pub metrics: Option<(Metrics, Socket)>,
    pub snapshots: SnapshotService,
}

impl ClientServices<'_> {
    /// Serves the control socket and the metrics until the result is dropped.
    pub fn serve(self, machine: &Machine) -> Result<ClientSockets> {
        let Self { options, pmu, policy, memory, log, metrics, snapshots } = self;
        let cpus = u8::try_from(machine.vcpus.len()).unwrap_or(u8::MAX);
        let running = Running {
            about: Summary::of_this(options, pmu, cpus, memory),
            begun: Instant::now(),
            vcpus: Arc::clone(&machine.vcpu_handles),
            kvm: machine.vcpus.iter().map(Vcpu::kvm_stats).collect(),
            pmu,
            host: running::host_pmu(pmu),
            policy: Mutex::new(policy),
            log: log.cloned(),
            memory: machine.vcpus[0].memory(),
            snapshots,
        };
        let socket = match metrics {
            Some((server, socket)) => {
                let (facts, vcpus) = (metrics::facts(&running.about), Arc::clone(&running.vcpus));
                server
                    .serve_machine(facts, move || running::report(&vcpus))
                    .context("cannot start the metrics' thread")?;
                Some(socket)
            }
            None => None,
        };
        let control = Control::open(running);
        Ok(ClientSockets { control: Some(control), metrics: socket })
    }
}
