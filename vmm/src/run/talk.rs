//! Connects to the default guest's agent.

use std::env;
use std::ffi::OsString;
use std::sync::Arc;
use std::thread::JoinHandle;

use anyhow::{Context, Result};
use devices::virtio::{Console, Transport};
use guest_agent::protocol::{self, Start, Terminals};

use crate::host::terminal::{self, Raw};
use crate::protocol::ending::Reporter;
use crate::run::flamegraph::{self, FlameGraph};
use crate::run::host_resources::GuestSetup;
use crate::run::start::source::GuestPhase;
use crate::run::streams::agent::{
    Agent, FirstTask, Handle, OnClose, PauseRequests, Sink, Streams, TemplateSaver,
};
use crate::run::streams::choose::{self, Chosen};

/// Parameters of the agent's start.
pub struct AgentStart<'a> {
    /// Command that the agent runs. If it is empty, the console gets a shell.
    pub command: &'a [OsString],
    /// What the agent sets up first.
    pub setup: GuestSetup,
    /// Flame graph for which the command is sampled.
    pub graph: Option<&'a mut FlameGraph>,
    /// What the guest does when it first runs here.
    pub phase: GuestPhase,
    /// Saves the machine when the agent is ready, instead of running the command.
    pub save: Option<TemplateSaver>,
}

/// A connection to the agent.
pub struct AgentStarted {
    /// Handle on the agent, for what handles signals.
    pub handle: Handle,
    /// Thread that talks to the agent.
    pub thread: JoinHandle<()>,
    /// The terminal in raw mode, if the user types into the guest.
    pub raw: Option<Raw>,
}

impl AgentStart<'_> {
    /// Connects to the agent, and starts the thread that talks to it.
    pub fn start(
        self,
        console: Console,
        transport: Arc<Transport>,
        pause_requests: PauseRequests,
        reporter: Reporter,
    ) -> Result<AgentStarted> {
        let chosen = match &self.phase {
            _ if self.command.is_empty() => {
                Ok(Chosen { streams: Streams::default(), terminals: Terminals::default(), raw: None })
            }
            GuestPhase::RunsCommand(state) => choose::continued(state.terminals(), state.has_input),
            GuestPhase::Boots | GuestPhase::AwaitsCommand => choose::choose(),
        };
        let Chosen { mut streams, terminals, raw } =
            chosen.context("cannot prepare the command's streams")?;
        let mut command = self.command.to_vec();
        if let Some(graph) = self.graph {
            let report = graph.report().context("cannot prepare the guest's report")?;
            streams.outputs.push((protocol::REPORT as usize, Sink::new(report, OnClose::Discard)));
            command = flamegraph::wrap(&command);
        }
        let GuestSetup { root, shares, network, working_dir, user, environment } = self.setup;
        let start = Start {
            root,
            shares,
            network,
            folder: working_dir,
            terminals,
            size: terminal::size(),
            term: env::var_os("TERM"),
            user,
            environment,
            // As late as possible, when it is sent.
            restored: None,
            command,
        };
        let first_task = match (self.save, self.phase) {
            (Some(save), _) => FirstTask::Save(save),
            (None, GuestPhase::RunsCommand(state)) => FirstTask::Continued(state, start.size),
            (None, GuestPhase::AwaitsCommand) => FirstTask::Restored(start),
            (None, GuestPhase::Boots) => FirstTask::WhenReady(start),
        };
        let (agent, handle) = Agent::new(transport, console, first_task, streams, pause_requests, reporter)
            .context("cannot prepare to talk to the guest")?;
        let thread = agent.spawn().context("cannot start a thread")?;
        Ok(AgentStarted { handle, thread, raw })
    }
}
