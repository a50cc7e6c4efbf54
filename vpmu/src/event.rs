//! What a counter counts, at which privilege levels, and when. Register models, counters and sources share these types.

mod cache;

use std::fmt;

pub use cache::{Cache, CacheResult, CacheUnit, Operation};

/// An event that a guest has selected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Event {
    /// An encoding of the host's PMU: the guest has the same vendor's PMU, and its encoding is passed through.
    Raw(u64),
    /// An event that Linux has a name for. The host's kernel finds its PMU's encoding.
    Generic(GenericEvent),
    /// An event that this host cannot count.
    Absent {
        /// The guest's encoding.
        code: u64,
        /// Name of the event, or a description of it.
        name: &'static str,
    },
    /// An event that the policy denies to the guest.
    Denied {
        /// The guest's encoding.
        code: u64,
        /// The name that `perf` has for it, if it has one.
        name: Option<&'static str>,
    },
}

impl Event {
    /// Returns whether this is a kind of cycles. No processor counts the same number of them twice.
    pub fn is_time(self) -> bool {
        use GenericEvent::{BusCycles, Cycles, ReferenceCycles, StalledBackend, StalledFrontend};
        matches!(self, Self::Generic(Cycles | ReferenceCycles | BusCycles | StalledFrontend | StalledBackend))
    }
}

/// An event that Linux has a name for (`enum perf_hw_id`, `PERF_TYPE_HW_CACHE`).
///
/// The first five count the same on all processors. Which caches the others are about, and what a stall is, depends on
/// the processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GenericEvent {
    /// Core cycles.
    Cycles,
    /// Cycles of a clock with a constant rate, while the core is not halted.
    ReferenceCycles,
    /// Retired instructions.
    Instructions,
    /// Retired branch instructions.
    Branches,
    /// Retired branch instructions that were mispredicted.
    BranchMisses,
    /// Cycles of the bus, or of a clock in its place.
    BusCycles,
    /// Accesses to the cache that Linux has chosen for this processor, mostly the last level.
    CacheReferences,
    /// Misses of the same cache.
    CacheMisses,
    /// Cycles in which the frontend delivers no instruction.
    StalledFrontend,
    /// Cycles in which the backend cannot execute an instruction.
    StalledBackend,
    /// An event of one of the caches, of a TLB or of the branch predictor.
    Cache(Cache),
}

/// The guest's privilege levels at which a counter counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filter {
    /// User mode only.
    User,
    /// The guest's kernel only.
    Kernel,
    /// User mode and the kernel.
    All,
}

impl Filter {
    /// Returns the filter of a counter that counts in user mode, in the kernel, or both. Returns `None` if it counts in
    /// neither.
    pub fn of(user: bool, kernel: bool) -> Option<Self> {
        match (user, kernel) {
            (true, true) => Some(Self::All),
            (true, false) => Some(Self::User),
            (false, true) => Some(Self::Kernel),
            (false, false) => None,
        }
    }
}

/// When a counter counts, of the time that the vCPU's thread runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// While the thread runs the guest.
    Guest,
    /// Also while the thread works for the guest in the host.
    Thread,
}

/// What a counter counts. Counters with equal selections can share one backing event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Selection {
    /// The event.
    pub event: Event,
    /// The privilege levels at which it counts.
    pub filter: Filter,
    /// When it counts.
    pub scope: Scope,
}

impl GenericEvent {
    /// Returns the name that `perf` prints.
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

    /// Returns the event that `perf` calls by this name, if there is one.
    pub fn named(name: &str) -> Option<Self> {
        let general = [
            Self::Cycles,
            Self::ReferenceCycles,
            Self::Instructions,
            Self::Branches,
            Self::BranchMisses,
            Self::BusCycles,
            Self::CacheReferences,
            Self::CacheMisses,
            Self::StalledFrontend,
            Self::StalledBackend,
        ];
        let caches = Cache::all().map(Self::Cache);
        general.into_iter().chain(caches).find(|one| one.name() == name || one.other_name() == Some(name))
    }

    /// Returns the alias that `perf` also accepts, if there is one.
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

impl fmt::Display for GenericEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Selection {
    /// Formats the selection as `perf` does: the event, a colon, and its modifiers.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.event {
            Event::Raw(code) | Event::Absent { code, .. } | Event::Denied { code, .. } => {
                write!(f, "r{code:x}")?;
            }
            Event::Generic(generic) => write!(f, "{generic}")?,
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
