//! Why this host gives no events, and what to do about it.

use std::fs;
use std::io;
use std::path::Path;

use crate::host;

/// What there is instead of such a host, where the lab can be built.
const SIMULATED: &str =
    if cfg!(target_arch = "x86_64") { ": `tally lab run` simulates a host that has" } else { "" };
/// What makes counters free.
const FREES: &str = if host::WATCHDOG.is_some() {
    "`sudo sysctl kernel.nmi_watchdog=0` frees one, and ending other users of perf the others"
} else {
    "ending other users of perf frees them"
};

/// What is in the way.
#[derive(Debug, thiserror::Error)]
pub enum Obstacle {
    /// There is no PMU.
    #[error(
        "this host has no PMU that counts guests (its perf says: {0}); cloud instances often have none{SIMULATED}"
    )]
    NoPmu(String),
    /// Users without privileges may not.
    #[error(
        "kernel.perf_event_paranoid is {0}, which forbids to count a guest's kernel: `sudo sysctl kernel.perf_event_paranoid=1`, or give the program the right: `sudo setcap cap_perfmon+ep $(command -v tally)`"
    )]
    Paranoid(i32),
    /// A sandbox is in the way.
    #[error(
        "perf_event_open is forbidden here, by a seccomp filter or a security module ({0}): for a container `docker run --security-opt seccomp=unconfined --cap-add PERFMON ...`"
    )]
    Forbidden(String),
    /// A virtual machine that has the PMU to itself keeps others from counting guests.
    #[error(
        "this host's KVM has handed the PMU through to a guest, or may not count guests ({0}): end the other virtual machines, or load KVM without it: `sudo modprobe kvm enable_mediated_pmu=0`"
    )]
    Mediated(String),
    /// Events that are to count guests only count the host as well.
    #[error(
        "this host's PMU does not tell guests from the host, as that of a virtual machine whose monitor does not either: counts would be wrong"
    )]
    CountsHost,
    /// Others hold them all.
    #[error("all counters of this host's PMU are in use: {FREES}")]
    NoneFree,
    /// No more events for this process.
    #[error("cannot open perf events: {0}")]
    Other(String),
}

impl Obstacle {
    /// What an error of `perf_event_open` means.
    pub fn from_error(error: &io::Error) -> Self {
        let said = error.to_string();
        match error.raw_os_error() {
            Some(libc::EOPNOTSUPP) if has_pmu() => Self::Mediated(said),
            Some(libc::ENOENT | libc::ENODEV | libc::EOPNOTSUPP) => Self::NoPmu(said),
            Some(libc::EACCES) => match paranoid() {
                Some(level) if level > 1 => Self::Paranoid(level),
                _ => Self::Forbidden(said),
            },
            Some(libc::EPERM | libc::ENOSYS) => Self::Forbidden(said),
            _ => Self::Other(said),
        }
    }

    /// Whether there is nothing that anybody could do about it on this host.
    pub fn is_for_good(&self) -> bool {
        matches!(self, Self::NoPmu(_))
    }
}

fn paranoid() -> Option<i32> {
    fs::read_to_string("/proc/sys/kernel/perf_event_paranoid").ok()?.trim().parse().ok()
}

fn has_pmu() -> bool {
    host::has_pmu(Path::new(host::DEVICES))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_obstacle_is_one_line_with_a_way_out() {
        for (errno, words) in [
            (libc::ENOENT, "cloud instances often have none"),
            (libc::EPERM, "seccomp"),
            (libc::ENOSYS, "seccomp"),
            (libc::EMFILE, "cannot open perf events"),
        ] {
            let text = Obstacle::from_error(&io::Error::from_raw_os_error(errno)).to_string();
            assert!(text.contains(words) && !text.contains('\n'), "{errno}: {text}");
        }
        assert!(Obstacle::Paranoid(2).to_string().contains("sysctl kernel.perf_event_paranoid=1"));
        let frees = Obstacle::NoneFree.to_string();
        assert_eq!(frees.contains("sysctl kernel.nmi_watchdog=0"), cfg!(target_arch = "x86_64"), "{frees}");
    }
}
