//! Gives up capabilities (`capabilities(7)`), which root has, and other users may have by a file capability.

use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

use super::{Reach, Thread};

/// What a thread needs that opens another user's files as root does.
const FILES: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID);

/// What counting a guest's kernel takes. `CAP_SYS_ADMIN` alone is enough for kernels before Linux 5.8, and needed for
/// those of Debian and Ubuntu if `kernel.perf_event_paranoid` is above 2.
const PERF: CapabilitySet = CapabilitySet::PERFMON.union(CapabilitySet::SYS_ADMIN);

/// Returns the capabilities that a kind of thread needs. A thread that can open files needs those by which root opens
/// all: the paths are restricted by other means.
pub fn needed(thread: Thread, reach: &[Reach]) -> CapabilitySet {
    match thread {
        Thread::Broker => PERF,
        _ if reach.is_empty() => CapabilitySet::empty(),
        _ => FILES,
    }
}

/// Gives up all capabilities of this thread but these.
pub fn keep(kept: CapabilitySet) -> rustix::io::Result<()> {
    let has = capabilities(None)?;
    set_capabilities(
        None,
        CapabilitySets {
            effective: has.effective & kept,
            permitted: has.permitted & kept,
            inheritable: CapabilitySet::empty(),
        },
    )
}
