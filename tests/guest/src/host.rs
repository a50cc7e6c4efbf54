//! The simulated host that a test runs on: the same sources test Tally on AMD's and on Intel's processors.

use std::cell::Cell;
use std::ops::Deref;
use std::sync::LazyLock;

use crate::lab::Results;

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

/// Results of a group of steps on each host. The group runs on a host when a test on that host needs it.
pub struct OnEachHost<T = Results> {
    amd: LazyLock<T>,
    intel: LazyLock<T>,
}

impl<T> OnEachHost<T> {
    /// Creates the results of a function, which is called on the thread of a test.
    pub const fn new(run: fn() -> T) -> Self {
        Self { amd: LazyLock::new(run), intel: LazyLock::new(run) }
    }
}

impl<T> Deref for OnEachHost<T> {
    type Target = T;

    /// Returns the results on the current test's host.
    fn deref(&self) -> &T {
        match current() {
            Host::Amd => &self.amd,
            Host::Intel => &self.intel,
        }
    }
}
