//! `tally run --sandbox`: what each thread of a run may ask the host's kernel for, once the machine is built. A guest
//! that takes over a thread then reaches little more than the guest itself.
//!
//! Each thread calls [`Confinement::enter`] before it touches anything of the guest's. From then on it may make only
//! the system calls that its kind needs ([`calls`]), opens only the paths that it was given ([`paths`]), and has only
//! the capabilities that it needs ([`capabilities`]). Any other system call ends the VM with a line ([`violation`]); a
//! path that a thread was not given does not open. What a run needs beyond that was opened before.

pub mod broker;
mod calls;
mod capabilities;
mod filter;
mod paths;
mod violation;

use std::io;
use std::sync::OnceLock;
use std::thread::{self, JoinHandle};

use log::{info, warn};
use rustix::thread::{CapabilitySet, set_no_new_privs};

use crate::host::{printer, terminal};
use crate::protocol::ending::FAILURE;
use filter::Filters;

pub use paths::{Access, Missing, Reach, missing};

/// What `--sandbox` does with a system call that a thread does not need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The call ends the VM.
    On,
    /// The call is carried out, and the kernel logs it (audit, or `dmesg`). Paths and capabilities are not restricted.
    Log,
    /// Nothing is restricted.
    Off,
}

/// The kinds of threads of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Thread {
    /// The only thread of the process that opens perf events for the others.
    Broker,
    /// The main thread, which runs the event loop, and at the end writes the flame graph and removes sockets.
    Main,
    Signals,
    /// Runs a vCPU, with its counters.
    Vcpu,
    Disk,
    Share,
    /// Carries the frames of a network.
    Network,
    /// Passes on the streams of the guest's command.
    Agent,
    /// Waits until the guest is ready, and saves the machine.
    Saver,
    /// Folds the samples of a flame graph.
    FlameGraph,
    /// Begins the next file of an event log.
    Log,
    /// Accepts and answers clients of the control socket.
    Control,
    /// Answers `--metrics`.
    Metrics,
}

/// The mode, once [`begin`] was called. Threads of other commands than `tally run` are in no sandbox.
static MODE: OnceLock<Mode> = OnceLock::new();

/// The sandbox cannot be used on this host.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    #[error("privileges cannot be given up: {0}")]
    Privileges(#[from] rustix::io::Errno),
    #[error("system calls cannot be restricted: {0}")]
    Calls(#[from] filter::FilterError),
    #[error("paths cannot be restricted: {0}")]
    Paths(#[from] landlock::RulesetError),
}

/// Prepares the sandbox, before the first thread is started. Says what this kernel cannot restrict.
pub fn begin(mode: Mode) -> Result<(), SandboxError> {
    MODE.get_or_init(|| mode);
    if mode == Mode::Off {
        return Ok(());
    }
    set_no_new_privs(true)?;
    limit_arenas();
    filter::check()?;
    if mode == Mode::On {
        violation::report();
        match missing() {
            Missing::Nothing => {}
            Missing::Some(what) => info!("sandbox: this kernel's Landlock cannot restrict {what}"),
            Missing::All(why) => warn!("sandbox: {why}, so that paths are not restricted"),
        }
    }
    Ok(())
}

/// Limits the number of the C library's heaps. When many threads have one each, it would look for the number of CPUs in
/// a file. Nor are heaps to shrink, before which it would look in another file; large blocks are in none of them.
fn limit_arenas() {
    /// The number from which on it would.
    #[cfg(target_env = "gnu")]
    const MAX: libc::c_int = 8;
    #[cfg(target_env = "gnu")]
    for (setting, value) in [(libc::M_ARENA_MAX, MAX), (libc::M_TRIM_THRESHOLD, libc::c_int::MAX)] {
        // SAFETY: takes numbers. Threads that start later share heaps.
        unsafe { libc::mallopt(setting, value) };
    }
}

/// What a kind of thread needs, prepared for threads of this kind.
pub struct Confinement {
    thread: Thread,
    mode: Mode,
    capabilities: CapabilitySet,
    reach: Vec<Reach>,
    filters: Option<Filters>,
}

impl Confinement {
    /// Prepares what a kind of thread needs; `reach` is what it may open. Most of the work is done here, once for all
    /// threads of the kind. If that fails, the process ends.
    pub fn new(thread: Thread, reach: Vec<Reach>) -> Self {
        let mode = MODE.get().copied().unwrap_or(Mode::Off);
        let filters = (mode != Mode::Off).then(|| calls::of(thread, &reach).compile(mode)).transpose();
        let filters = filters.unwrap_or_else(|error| fail(&error.into()));
        let capabilities = match mode {
            Mode::On => capabilities::needed(thread, &reach),
            Mode::Log | Mode::Off => CapabilitySet::empty(),
        };
        Self { thread, mode, capabilities, reach, filters }
    }

    /// Restricts this thread, and those that it starts from now on. If that fails, the process ends: no guest runs with
    /// less than the sandbox that was asked for.
    pub fn enter(&self) {
        self.restrict().unwrap_or_else(|error| fail(&error));
    }

    fn restrict(&self) -> Result<(), SandboxError> {
        if self.mode == Mode::On {
            capabilities::keep(self.capabilities)?;
            // To the kernel, counting a thread is a kind of tracing it, which Landlock forbids across its borders. The
            // broker makes no system call that takes a path.
            if self.thread != Thread::Broker {
                paths::restrict(&self.reach)?;
            }
        }
        if let Some(filters) = &self.filters {
            filters.apply()?;
        }
        Ok(())
    }
}

/// Returns what the user is told.
pub fn refusal(error: &SandboxError) -> String {
    format!("--sandbox: {error}; without it: --sandbox off")
}

fn fail(error: &SandboxError) -> ! {
    terminal::restore();
    printer::say(&refusal(error));
    // SAFETY: takes no pointer, and runs nothing of ours: other threads may be anywhere.
    unsafe { libc::_exit(FAILURE.into()) }
}

/// Starts a thread that enters the sandbox and then does its work.
pub fn spawn<T: Send + 'static>(
    name: impl Into<String>,
    thread: Thread,
    reach: Vec<Reach>,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let confinement = Confinement::new(thread, reach);
    let work = move || {
        confinement.enter();
        work()
    };
    thread::Builder::new().name(name.into()).spawn(work)
}
