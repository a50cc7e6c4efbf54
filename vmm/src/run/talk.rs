//! The conversation with the default guest's agent: what it is told at the start.

use std::env;
use std::ffi::OsString;
use std::sync::Arc;
use std::thread::JoinHandle;

use anyhow::{Context, Result};
use devices::virtio::{Console, Transport};
use guest_agent::protocol::{self, Share, Start, Terminals};

use super::streams::{self, Chosen};
use crate::agent::{Agent, Handle, OnClose, Sink, Streams};
use crate::ending::Reporter;
use crate::flamegraph::{self, FlameGraph};
use crate::terminal::{self, Raw};

/// What it is about.
pub struct Talk<'a> {
    /// What the agent is to run. Without, it gives a shell on the console.
    pub command: &'a [OsString],
    /// What it is to mount first.
    pub shares: Vec<Share>,
    /// The folder to start in.
    pub folder: Option<OsString>,
    /// What the command is to be sampled for.
    pub graph: Option<&'a mut FlameGraph>,
}

/// A conversation that goes on.
pub struct Begun {
    /// For the event loop.
    pub handle: Handle,
    /// Ends when all is said.
    pub thread: JoinHandle<()>,
    /// The terminal, if somebody types into the guest.
    pub raw: Option<Raw>,
}

impl Talk<'_> {
    /// Begins it.
    pub fn begin(self, console: Console, transport: Arc<Transport>, reporter: Reporter) -> Result<Begun> {
        let Chosen { mut streams, terminals, raw } = if self.command.is_empty() {
            Chosen { streams: Streams::default(), terminals: Terminals::default(), raw: None }
        } else {
            streams::choose().context("cannot prepare the command's streams")?
        };
        let mut command = self.command.to_vec();
        if let Some(graph) = self.graph {
            let report = graph.report().context("cannot prepare the guest's report")?;
            streams.outputs.push((protocol::REPORT as usize, Sink::new(report, OnClose::Go)));
            command = flamegraph::wrap(&command);
        }
        let start = Start {
            shares: self.shares,
            folder: self.folder,
            terminals,
            size: terminal::size(),
            term: env::var_os("TERM"),
            command,
        };
        let (agent, handle) = Agent::new(transport, console, start, streams, reporter)
            .context("cannot prepare to talk to the guest")?;
        let thread = agent.spawn().context("cannot start a thread")?;
        Ok(Begun { handle, thread, raw })
    }
}
