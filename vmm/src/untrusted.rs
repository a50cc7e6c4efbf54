//! What others say to Tally, without sockets, files and threads around it: running VMs to `tally list` and `tally
//! stat`, clients to a VM, an event log to `tally log --show`, a snapshot to `tally run --restore`, and the guest's
//! agent to the host. The fuzz targets call these functions; the program does not.

use std::fs::File;
use std::io::{self, Write};
use std::iter;
use std::sync::Arc;

use clap::Parser;
use devices::virtio::{Console, Transport};
use guest_agent::protocol::{self, Size, Start};
use tally_machine::MachineState;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::EventFd;

use crate::cli::{Cli, Command};
use crate::commands::client::{self, ClientError};
use crate::commands::log::{self, Part};
use crate::commands::stat;
use crate::protocol::ending::{Endings, Reporter};
use crate::protocol::message::{self, Answer, Request};
use crate::protocol::status::Summary;
use crate::run::event_loop::Next;
use crate::run::start::snapshot::GuestState;
use crate::run::streams::agent::{self, AgentState, Directive, OnClose, Sink, Streams};
use crate::run::streams::input::Input;

/// Returns what `tally list`, `tally stat` and `tally policy` print or serve for the answers of a VM, one after the
/// other, up to its first error. `None` if the VM said nothing.
pub fn answers(mut bytes: &[u8]) -> Option<String> {
    let mut said = None;
    let mut about = Summary {
        pid: 1,
        name: String::new(),
        runs: String::new(),
        pmu: String::new(),
        leaves_out_entries: false,
        cpus: 1,
        memory: 0,
        started: 0,
        age: 0.0,
    };
    loop {
        let shown = match client::answer(0, &mut bytes) {
            Ok(answer) => {
                if let Answer::Hello(hello) = &answer {
                    about = hello.clone();
                }
                stat::shown(&about, &answer)
            }
            Err(ClientError::Ended(_)) => return said,
            Err(error) => return Some(said.unwrap_or_default() + &error.to_string()),
        };
        said.get_or_insert_default().push_str(&shown);
    }
}

/// Returns whether a VM takes this for a request.
pub fn is_request(bytes: &[u8]) -> bool {
    matches!(message::receive::<Request>(&mut &*bytes), Ok(Some(_)))
}

/// Prints the event log with this content as `tally log --show` does, or only its summary. Returns the error that ends
/// the log.
pub fn log(bytes: &[u8], only_summary: bool, out: &mut impl Write) -> io::Result<Option<String>> {
    let part = if only_summary { Part::Summary } else { Part::All };
    log::show_bytes(bytes, part, out)
}

/// Reads the state of a snapshot, and the options of the run that would continue the guest. Returns the machine, if a
/// guest can have as much memory here.
pub fn saved_guest(state: &[u8]) -> Option<MachineState> {
    let GuestState { setup, mut machine, .. } = serde_json::from_slice(state).ok()?;
    let Command::Run(given) = Cli::try_parse_from(["tally", "run"]).ok()?.command else { return None };
    let options = setup.options(&given);
    options.memory.check_here().ok()?;
    machine.accept_copies_of_disks();
    Some(machine)
}

/// The host's side of the agent, without its thread.
pub struct Agent {
    host: agent::Agent,
    handle: Option<agent::Handle>,
    endings: Endings,
}

impl Agent {
    /// Creates the host's side, and the transport of its console in the guest's `memory`. The command's input is read
    /// from `input`, and its output and errors are written to files.
    pub fn new(
        memory: GuestMemoryMmap,
        input: File,
        [output, errors]: [File; 2],
    ) -> io::Result<(Self, Arc<Transport>)> {
        let start = Start { command: vec!["true".into()], ..Start::default() };
        Self::begin(agent::console(), agent::FirstTask::WhenReady(start), memory, input, [output, errors])
    }

    /// Creates the host's side of an agent that was saved in this state, as JSON. `None` if it is refused.
    pub fn restored(
        state: &[u8],
        memory: GuestMemoryMmap,
        input: File,
        outputs: [File; 2],
    ) -> io::Result<Option<(Self, Arc<Transport>)>> {
        let Ok(state) = serde_json::from_slice::<AgentState>(state) else { return Ok(None) };
        let mut console = agent::console();
        if console.restore(&state.console).is_err() {
            return Ok(None);
        }
        let first_task = agent::FirstTask::Continued(Box::new(state), None);
        // As with a run, an error is that of the state.
        Ok(Self::begin(console, first_task, memory, input, outputs).ok())
    }

    fn begin(
        console: Console,
        first_task: agent::FirstTask,
        memory: GuestMemoryMmap,
        input: File,
        [output, errors]: [File; 2],
    ) -> io::Result<(Self, Arc<Transport>)> {
        let transport = Transport::new(&console, memory, EventFd::new(libc::EFD_NONBLOCK)?)?;
        let streams = Streams {
            input: Some((protocol::STDIN as usize, Input::file(input))),
            outputs: vec![
                (protocol::STDOUT as usize, Sink::new(output, OnClose::End)),
                (protocol::STDERR as usize, Sink::new(errors, OnClose::Discard)),
            ],
        };
        let (reporter, endings) = Reporter::new()?;
        let (host, handle) = agent::Agent::new(
            Arc::clone(&transport),
            console,
            first_task,
            streams,
            agent::AgentPauser::new()?.1,
            reporter,
        )?;
        Ok((Self { host, handle: Some(handle), endings }, transport))
    }

    /// Does what the agent's thread does each time it wakes up. Returns false at the thread's end.
    pub fn turn(&mut self) -> bool {
        let is_ending = self.host.directive() != Directive::Work;
        self.host.read_input();
        self.host.work() != Next::End(()) && !is_ending
    }

    /// Passes on a signal. Returns false if it ends the machine.
    pub fn signal(&self, signal: i32) -> bool {
        self.handle.as_ref().is_some_and(|handle| handle.signal(signal))
    }

    /// Passes on the size of the terminal.
    pub fn resize(&self, rows: u16, columns: u16) {
        if let Some(handle) = &self.handle {
            handle.resize(Size { rows, columns });
        }
    }

    /// The machine ends: the thread is told.
    pub fn end(&mut self) {
        self.handle = None;
    }

    /// Returns the number of bytes that wait for room in the guest's queue.
    pub fn waiting(&self) -> usize {
        self.host.waiting()
    }

    /// Returns the endings that were reported, as text.
    pub fn endings(&self) -> impl Iterator<Item = String> {
        iter::from_fn(|| self.endings.next()).map(|ending| ending.to_string())
    }
}
