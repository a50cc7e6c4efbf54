//! How many events' pages a user may have mapped (`perf_mmap` in Linux, kernel/events/core.c). An event whose page is
//! not mapped is read by a system call.

use std::fs;

use rustix::process::{Resource, getrlimit};

use crate::rights::paranoid;

/// Command that lets users map enough pages for some hundred vCPUs on each CPU of the host.
pub const MORE_PAGES: &str = "sudo sysctl kernel.perf_event_mlock_kb=16384";

/// Limits on mapped pages, in pages. A process with `CAP_IPC_LOCK` has none, but no thread of a guest should keep that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageLimits {
    /// For all processes of a user together.
    pub of_user: u64,
    /// For each process, when those of the user are used up.
    pub of_process: u64,
}

impl PageLimits {
    /// Returns the limits of this process. Returns `None` if there are none.
    pub fn of_this_process() -> Option<Self> {
        if paranoid().is_none_or(|level| level < 0) {
            return None;
        }
        let kib = fs::read_to_string("/proc/sys/kernel/perf_event_mlock_kb").ok()?.trim().parse().ok()?;
        // SAFETY: takes a number, and returns one.
        let cpus = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
        let locked = getrlimit(Resource::Memlock).current;
        Some(Self::new(kib, u64::try_from(cpus).unwrap_or(1), locked))
    }

    fn new(kib: u64, cpus: u64, locked_bytes: Option<u64>) -> Self {
        let page = rustix::param::page_size() as u64;
        Self {
            of_user: (kib / (page >> 10)).saturating_mul(cpus),
            of_process: locked_bytes.map_or(u64::MAX, |bytes| bytes / page),
        }
    }

    /// Returns how many threads with this many events each can have all of their pages mapped, in one process.
    pub fn threads(self, events: u64) -> u64 {
        self.of_user.saturating_add(self.of_process) / events.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linux_defaults_let_one_process_map_the_pages_of_hundreds_of_threads() {
        let limits = PageLimits::new(516, 2, Some(8 << 20));
        assert_eq!(limits, PageLimits { of_user: 258, of_process: 2048 });
        assert_eq!(limits.threads(6), 384);
        assert_eq!(PageLimits::new(516, 1, Some(64 << 10)).threads(6), 24, "before Linux 5.16");
        assert_eq!(PageLimits::new(516, 1, None).threads(1), u64::MAX);
    }
}
