//! The simulated host that a test runs on: the same sources test Tally on AMD's and on Intel's processors.

use std::cell::Cell;
use std::ops::RangeInclusive;

use tally_lab::programs::NO_TABLE_OF_EVENTS;
use tally_lab::{HostPmu, Perfmon, Scenario};

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

/// A processor whose PMU makes the mistakes that are known or assumed of real ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Silicon {
    /// AMD's Zen 2 and 3.
    Zen2,
    /// AMD's Zen 4 and 5, with PerfMonV2.
    Zen4,
    /// Intel's client processors, with version 4 of its PMU.
    Skylake,
    /// Intel's server processors, with version 5.
    Icelake,
}

impl Silicon {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Zen2, Self::Zen4, Self::Skylake, Self::Icelake];

    /// Returns the name of the lab's profile.
    pub fn name(self) -> &'static str {
        match self {
            Self::Zen2 => "zen2",
            Self::Zen4 => "zen4",
            Self::Skylake => "skylake",
            Self::Icelake => "icelake",
        }
    }

    /// Returns the host that such a processor belongs to.
    pub fn host(self) -> Host {
        match self {
            Self::Zen2 | Self::Zen4 => Host::Amd,
            Self::Skylake | Self::Icelake => Host::Intel,
        }
    }

    /// Returns how late an overflow's interrupt may be, in instructions. The host's kernel then needs a few to stop the
    /// guest, in which nothing of the guest is counted.
    pub fn skid(self) -> RangeInclusive<u64> {
        match self {
            Self::Zen2 | Self::Zen4 => 1000..=24_800,
            Self::Skylake | Self::Icelake => 18..=81,
        }
    }

    /// Gives a host such a processor.
    pub fn configure(self, host: Scenario) -> Scenario {
        let host = host.silicon(self.name().parse().expect("the lab has this profile"));
        match self {
            Self::Zen2 => host,
            Self::Zen4 => host.pmu(HostPmu::PerfMonV2),
            Self::Skylake => host.pmu(HostPmu::Intel(Perfmon::V4)),
            Self::Icelake => host.pmu(HostPmu::Intel(Perfmon::V5)),
        }
    }
}

thread_local! {
    static SILICON: Cell<Option<Silicon>> = const { Cell::new(None) };
}

/// Returns how the PMU misbehaves on the host of the test that this thread runs, if it does.
pub fn silicon() -> Option<Silicon> {
    SILICON.get()
}

/// Sets how the PMU misbehaves on the host of the test that this thread runs.
pub(crate) fn set_silicon(silicon: Option<Silicon>) {
    SILICON.set(silicon);
}

/// Returns a command at the start of scripts that run perf. No test uses the names of the processor's own events.
pub fn prelude() -> &'static str {
    match current() {
        // A host that was saved has found out that its processor makes no mistakes.
        Host::Amd if silicon().is_some() => "rm -rf ~/.cache/tally/entry-ticks-*\n",
        Host::Amd => "",
        Host::Intel => NO_TABLE_OF_EVENTS,
    }
}
