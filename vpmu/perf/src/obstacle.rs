//! Why this host's perf events cannot be used, and what the user can do about it.

use std::io;
use std::path::Path;

use crate::host;
use crate::probe::NotFree;
use crate::rights::{Needed, PARANOID, Rights, paranoid};

/// What a user without such a host can do, where the lab can be built.
const SIMULATED_HOST: &str =
    if cfg!(target_arch = "x86_64") { ": `tally lab run` simulates a host that has" } else { "" };

/// Why this host's perf events cannot count a guest. The message says what the user can do.
#[derive(Debug, thiserror::Error)]
pub enum Obstacle {
    /// The host has no PMU that can count guests. Contains perf's error.
    #[error(
        "this host has no PMU that counts guests (its perf says: {0}); cloud instances often have none{SIMULATED_HOST}"
    )]
    NoPmu(String),
    /// `kernel.perf_event_paranoid`, which has this value, does not allow this user to count a guest's kernel.
    #[error("{}", forbidden_by(*.0))]
    Paranoid(i32),
    /// A sandbox forbids `perf_event_open`. Contains the error.
    #[error(
        "perf_event_open is forbidden here, by a seccomp filter or a security module ({0}): for a container `docker run --security-opt seccomp=unconfined --cap-add PERFMON ...`"
    )]
    Forbidden(String),
    /// KVM's mediated vPMU, which gives the whole PMU to a guest, or KVM's configuration, keeps others from counting
    /// guests. Contains perf's error.
    #[error(
        "this host's KVM has handed the PMU through to a guest, or may not count guests ({0}): end the other virtual machines, or load KVM without it, as `tally doctor` says"
    )]
    Mediated(String),
    /// Events that should count guests only count the host as well.
    #[error(
        "this host's PMU does not tell guests from the host, perhaps because the host is itself a virtual machine: counts would be wrong"
    )]
    CountsHost,
    /// Others hold all hardware counters.
    #[error(
        "all counters of this host's PMU are in use{}: ending other users of perf frees them",
        host::watchdog_hint()
    )]
    NoneFree,
    /// Any other error, such as too many open files.
    #[error("cannot open perf events: {0}")]
    Other(String),
}

impl From<NotFree> for Obstacle {
    fn from(error: NotFree) -> Self {
        match error {
            NotFree::NoneFree => Self::NoneFree,
            NotFree::CountsHost => Self::CountsHost,
            NotFree::Refused(error) => Self::from_error(&error),
        }
    }
}

impl Obstacle {
    /// Returns the obstacle behind an error of `perf_event_open`.
    pub fn from_error(error: &io::Error) -> Self {
        let message = error.to_string();
        match error.raw_os_error() {
            Some(libc::EOPNOTSUPP) if has_pmu() => Self::Mediated(message),
            Some(libc::ENOENT | libc::ENODEV | libc::EOPNOTSUPP) => Self::NoPmu(message),
            Some(libc::EACCES) => match paranoid() {
                Some(level) if !Rights::of_this_process().suffice_for(Needed::at(level)) => {
                    Self::Paranoid(level)
                }
                _ => Self::Forbidden(message),
            },
            Some(libc::EPERM | libc::ENOSYS) => Self::Forbidden(message),
            _ => Self::Other(message),
        }
    }

    /// Returns whether no change of this host's configuration would help.
    pub fn is_permanent(&self) -> bool {
        matches!(self, Self::NoPmu(_))
    }
}

/// Says what a value of `kernel.perf_event_paranoid` forbids, and what helps.
fn forbidden_by(level: i32) -> String {
    let needed = Needed::at(level);
    format!("{PARANOID} is {level}, {}: {}", needed.refusal(), needed.remedy())
}

fn has_pmu() -> bool {
    host::has_pmu(Path::new(host::DEVICES))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_obstacle_is_one_line_that_says_what_to_do() {
        for (errno, words) in [
            (libc::ENOENT, "cloud instances often have none"),
            (libc::EPERM, "seccomp"),
            (libc::ENOSYS, "seccomp"),
            (libc::EMFILE, "cannot open perf events"),
        ] {
            let text = Obstacle::from_error(&io::Error::from_raw_os_error(errno)).to_string();
            assert!(text.contains(words) && !text.contains('\n'), "{errno}: {text}");
        }
        for level in [2, 3, 4] {
            let text = Obstacle::Paranoid(level).to_string();
            assert!(text.contains("`sudo sysctl kernel.perf_event_paranoid=1`"), "{text}");
            assert_eq!(text.contains("setcap"), level == 2, "{text}");
        }
        let frees = Obstacle::NoneFree.to_string();
        assert!(frees.contains("ending other users of perf frees them"), "{frees}");
        assert_eq!(frees.contains("sysctl"), !host::watchdog_hint().is_empty(), "{frees}");
    }
}
