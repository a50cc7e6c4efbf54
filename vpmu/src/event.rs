//! What a counter counts, and when: the words that models, bank and sources share.

mod cache;

use std::fmt;

pub use cache::{Cache, CacheResult, CacheUnit, Operation};

/// What is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Event {
    /// What the host's own PMU calls it: the guest's encoding, passed through.
    Raw(u64),
    /// By its meaning, whatever the host's PMU calls it.
    Meaning(Meaning),
    /// Nothing that this host could count.
    Absent {
        /// The guest's encoding.
        code: u64,
        /// What the guest's maker calls it.
        name: &'static str,
    },
    /// Something that the guest may not count.
    Denied {
        /// The guest's encoding.
        code: u64,
        /// What `perf` calls it, if it does.
        name: Option<&'static str>,
    },
}

/// What the host's kernel has a name for, and knows what its PMU calls it. The first five are counted on every host, to the
/// same result; which caches the others are about, and what stalls are, is up to the processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Meaning {
    /// Cycles of the core.
    Cycles,
    /// Cycles at a rate that never changes, while the core is not halted.
    ReferenceCycles,
    /// Instructions that retired.
    Instructions,
    /// Branch instructions that retired.
    Branches,
    /// Those of them that were mispredicted.
    BranchMisses,
    /// Cycles of the bus, or of a clock that stands for it.
    BusCycles,
    /// Accesses to the cache that the processor's maker deems worth it, mostly the last.
    CacheReferences,
    /// Those of them that missed.
    CacheMisses,
    /// Cycles without an instruction to execute.
    StalledFrontend,
    /// Cycles without the means to execute one.
    StalledBackend,
    /// What happens in one of the caches, or in what works like one.
    Cache(Cache),
}

/// The privilege levels at which the guest is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filter {
    /// Its programs only.
    User,
    /// Its kernel only.
    Kernel,
    /// Both.
    All,
}

impl Filter {
    /// That of a counter that is told of either level whether it counts there; none if it never does.
    pub fn of(user: bool, kernel: bool) -> Option<Self> {
        match (user, kernel) {
            (true, true) => Some(Self::All),
            (true, false) => Some(Self::User),
            (false, true) => Some(Self::Kernel),
            (false, false) => None,
        }
    }
}

/// When a vCPU's thread is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// While it runs the guest.
    Guest,
    /// Also while it works for the guest.
    Thread,
}

/// A counter's configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Selection {
    /// What it counts.
    pub event: Event,
    /// At which privilege levels.
    pub filter: Filter,
    /// And when.
    pub scope: Scope,
}

impl Meaning {
    /// What `perf` calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cycles => "cycles",
            Self::ReferenceCycles => "ref-cycles",
            Self::Instructions => "instructions",
            Self::Branches => "branches",
            Self::BranchMisses => "branch-misses",
            Self::BusCycles => "bus-cycles",
            Self::CacheReferences => "cache-references",
            Self::CacheMisses => "cache-misses",
            Self::StalledFrontend => "stalled-cycles-frontend",
            Self::StalledBackend => "stalled-cycles-backend",
            Self::Cache(cache) => cache.name(),
        }
    }

    /// What else `perf` calls it.
    pub fn other_name(self) -> Option<&'static str> {
        match self {
            Self::Cycles => Some("cpu-cycles"),
            Self::Branches => Some("branch-instructions"),
            Self::StalledFrontend => Some("idle-cycles-frontend"),
            Self::StalledBackend => Some("idle-cycles-backend"),
            _ => None,
        }
    }
}

impl fmt::Display for Meaning {
    /// As `perf` has it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Selection {
    /// As `perf` has it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.event {
            Event::Raw(code) | Event::Absent { code, .. } | Event::Denied { code, .. } => {
                write!(f, "r{code:x}")?;
            }
            Event::Meaning(meaning) => write!(f, "{meaning}")?,
        }
        f.write_str(match self.filter {
            Filter::User => ":u",
            Filter::Kernel => ":k",
            Filter::All => ":uk",
        })?;
        if self.scope == Scope::Thread {
            f.write_str("GH")?;
        }
        match self.event {
            Event::Absent { name, .. } | Event::Denied { name: Some(name), .. } => write!(f, " ({name})"),
            _ => Ok(()),
        }
    }
}
