//! The simulated host that a test runs on: the same sources test Tally on AMD's and on Intel's processors.

use std::cell::Cell;

use tally_lab::programs::NO_TABLE_OF_EVENTS;

/// A simulated x86-64 host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Host {
    /// The default one.
    Amd,
    /// The one that needs more time.
    Intel,
}

thread_local! {
    static CURRENT: Cell<Host> = const { Cell::new(Host::Amd) };
}

/// Returns the host of the test that this thread runs.
pub fn current() -> Host {
    CURRENT.get()
}

/// Sets the host of the test that this thread runs.
pub(crate) fn set(host: Host) {
    CURRENT.set(host);
}

/// Returns a command at the start of scripts that run perf. No test uses the names of the processor's own events.
pub fn prelude() -> &'static str {
    match current() {
        Host::Amd => "",
        Host::Intel => NO_TABLE_OF_EVENTS,
    }
}
