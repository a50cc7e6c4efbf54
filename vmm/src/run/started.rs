//! The third and fourth stage of a run: the guest runs, and then has ended. At its end the [`Guards`] are dropped in
//! order.

use std::fmt::Display;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread::JoinHandle;

use anyhow::{Context, Result};
use devices::End;
use log::info;

use crate::cli::Run;
use crate::host::terminal::Raw;
use crate::host::{printer, signals};
use crate::protocol::ending::{Ending, FAILURE};
use crate::run::clients::control;
use crate::run::clients::control::Control;
use crate::run::clients::metrics::Socket;
use crate::run::event_log::EventLog;
use crate::run::event_loop::EventLoop;
use crate::run::flamegraph::FlameGraph;
use crate::run::lost_memory;
use crate::run::streams::console::Output;
use crate::sandbox::Reach;

/// Sockets through which clients find the machine until this is dropped.
#[derive(Default)]
pub struct ClientSockets {
    #[expect(dead_code, reason = "it is kept for its drop")]
    pub control: Option<Control>,
    pub metrics: Option<Socket>,
}

impl ClientSockets {
    /// Returns what removing the sockets needs.
    pub fn reach(&self) -> Vec<Reach> {
        control::reach().into_iter().chain(self.metrics.as_ref().and_then(Socket::reach)).collect()
    }
}

/// What is dropped when the machine has ended. The order of the fields is the order of their drops.
pub struct Guards {
    /// Dropped first, so that clients do not find a machine that has ended.
    #[expect(dead_code, reason = "it is kept for its drop")]
    pub client_sockets: ClientSockets,
    /// The event loop. Its drop drops the handle on the agent, so that the agent's thread ends, and sends unread
    /// signals again.
    pub events: EventLoop<Ending>,
    /// Dropped last, so that the terminal is restored only when nothing reads it any more.
    #[expect(dead_code, reason = "it is kept for its drop")]
    pub raw: Option<Raw>,
}

/// A guest that runs.
pub struct Started<'a> {
    pub options: &'a Run,
    pub log: Option<&'a Arc<EventLog>>,
    pub guards: Guards,
    pub output: Output,
    /// The thread that talks to the agent, if there is one.
    pub agent: Option<JoinHandle<()>>,
    pub graph: Option<FlameGraph>,
}

/// A guest that has ended. Only its output and how it ended are left.
pub struct Ended<'a> {
    options: &'a Run,
    ending: Ending,
    output: Output,
    agent: Option<JoinHandle<()>>,
    graph: Option<FlameGraph>,
}

impl<'a> Started<'a> {
    /// Waits for the machine's end.
    pub fn wait(self) -> Result<Ended<'a>> {
        let Self { options, log, mut guards, output, agent, graph } = self;
        let ending = guards.events.run().context("cannot wait for events")?;
        drop(guards);
        if ending.is_interrupted() {
            output.try_flush();
        }
        // The rest may block while a reader of the output is slow, so signals have to end this process again.
        signals::unblock_events().context("cannot unblock signals")?;
        close(log, &ending);
        Ok(Ended { options, ending, output, agent, graph })
    }
}

impl Ended<'_> {
    /// Writes the rest of the guest's output and the flame graph. Returns the exit status of the run.
    pub fn conclude(self) -> Result<ExitCode> {
        let Self { options, ending, output, agent, graph } = self;
        if !ending.is_interrupted() {
            output.flush_all();
            if let Some(agent) = agent {
                // An error would mean that the thread has panicked, which ends the process anyway.
                let _ = agent.join();
            }
        }
        if let (Some(graph), Ending::Command(status)) = (graph, &ending)
            && let Err(error) = graph.finish(&options.command)
        {
            if *status == 0 {
                return Err(error);
            }
            // The status of a failed command is more useful than an error about the flame graph.
            printer::say(&format_args!("{error:#}"));
        }
        Ok(status(&ending, options, &output))
    }
}

/// Closes the event log. Prints an error if records are missing.
pub fn close(log: Option<&Arc<EventLog>>, how: &dyn Display) {
    if let Some(log) = log
        && let Err(error) = log.end(how)
    {
        printer::say(&error);
    }
}

/// Returns the exit status. Prints why the machine ended if this is a failure.
fn status(ending: &Ending, options: &Run, console: &Output) -> ExitCode {
    const INTERRUPTED: u8 = 128;
    let has_command = !options.command.is_empty();
    info!("{ending}");
    let died = |how: &str| {
        printer::say(&how);
        if has_command {
            let tail = console.tail();
            if !tail.is_empty() {
                printer::say_with_lines(&"the guest's console ended with:", &tail);
            }
        }
        ExitCode::from(FAILURE)
    };
    match ending {
        Ending::Command(status) => ExitCode::from(*status),
        Ending::Agent(_) | Ending::Output(_) => {
            printer::say(ending);
            ExitCode::from(FAILURE)
        }
        // As with QEMU's isa-debug-exit, no value maps to success.
        Ending::Guest(End::DebugExit(value)) => ExitCode::from(value << 1 | 1),
        Ending::Guest(End::PowerOff) if has_command => {
            died("the guest switched itself off before its command ended")
        }
        Ending::Guest(End::Reboot) if has_command => died("the guest reset before its command ended"),
        // KVM's error depends on how the vCPU came to access its memory.
        Ending::Failed(_) if lost_memory::is_lost() => died(lost_memory::LOST),
        Ending::Failed(failure) => died(&failure.to_string()),
        Ending::Signal(signal) if has_command => {
            ExitCode::from(u8::try_from(*signal).map_or(FAILURE, |signal| INTERRUPTED | signal))
        }
        Ending::Saved if options.save_template.is_none() => {
            printer::say(&"the guest was saved; `tally run --restore` continues it");
            if has_command { ExitCode::from(FAILURE) } else { ExitCode::SUCCESS }
        }
        // As after Ctrl-C (SIGINT).
        Ending::Quit if has_command => ExitCode::from(INTERRUPTED | 2),
        Ending::Saved | Ending::Guest(End::PowerOff | End::Reboot) | Ending::Quit | Ending::Signal(_) => {
            ExitCode::SUCCESS
        }
    }
}
