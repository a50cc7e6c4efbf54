//! Gives up capabilities (`capabilities(7)`), which root has, and other users may have by a file capability.

use std::fs;

use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

use super::{Reach, Thread};

/// What a thread needs that opens another user's files as root does.
const FILES: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID);

/// Returns the capabilities that a kind of thread needs. A thread that can open files needs those by which root opens
/// all: the paths are restricted by other means.
pub fn needed(thread: Thread, reach: &[Reach]) -> CapabilitySet {
    let files = if reach.is_empty() { CapabilitySet::empty() } else { FILES };
    let counts = matches!(thread, Thread::Vcpu | Thread::Control);
    if counts && !anybody_counts_guests() { files | CapabilitySet::PERFMON } else { files }
}

/// Returns true if a user without privileges can count a guest's kernel.
fn anybody_counts_guests() -> bool {
    const MAX: i32 = 1;
    let level = fs::read_to_string("/proc/sys/kernel/perf_event_paranoid").ok();
    level.and_then(|level| level.trim().parse().ok()).is_some_and(|level: i32| level <= MAX)
}

/// Gives up all capabilities of this thread but these.
pub fn keep(kept: CapabilitySet) -> rustix::io::Result<()> {
    let has = capabilities(None)?;
    let mut kept = kept;
    if kept.contains(CapabilitySet::PERFMON) && !has.permitted.contains(CapabilitySet::PERFMON) {
        // Before Linux 5.8, this was what counting a guest's kernel took.
        kept |= CapabilitySet::SYS_ADMIN;
    }
    set_capabilities(
        None,
        CapabilitySets {
            effective: has.effective & kept,
            permitted: has.permitted & kept,
            inheritable: CapabilitySet::empty(),
        },
    )
}
