//! Facts about this process: its capabilities, its sandbox, its limits.

use std::env;
use std::fs;

use rustix::process::{Resource, getrlimit};

use crate::fact::Fact;
use crate::sandbox::{Missing, missing};

/// Numbers of capabilities in `linux/capability.h`. Before Linux 5.8 had `CAP_PERFMON`, `CAP_SYS_ADMIN` was the right
/// to all of perf.
const PERFMON: u32 = 38;
const SYS_ADMIN: u32 = 21;
/// Files of a vCPU: itself and one for each of its counters. A machine has some tens.
const FILES_OF_A_VCPU: u64 = 12;
const FILES_OF_A_MACHINE: u64 = 64;

/// Returns the facts about this process.
pub fn facts() -> Vec<Fact> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    [Some(perfmon(&status)), sandbox(&status), Some(landlock()), Some(files())]
        .into_iter()
        .flatten()
        .collect()
}

/// Returns true if this process may count in kernels whatever `perf_event_paranoid` is.
pub fn is_privileged() -> bool {
    has_perfmon(&fs::read_to_string("/proc/self/status").unwrap_or_default())
}

fn has_perfmon(status: &str) -> bool {
    let capabilities = value(status, "CapEff").and_then(|set| u64::from_str_radix(set, 16).ok()).unwrap_or(0);
    capabilities & (1 << PERFMON | 1 << SYS_ADMIN) != 0
}

fn perfmon(status: &str) -> Fact {
    let about = "privilege";
    if has_perfmon(status) {
        return Fact::note(about, "this process has CAP_PERFMON, and may count in every kernel");
    }
    let program = env::current_exe().map_or_else(|_| "tally".to_owned(), |path| path.display().to_string());
    Fact::note(
        about,
        format!(
            "this process has no CAP_PERFMON; to give it to this program alone: `sudo setcap cap_perfmon+ep {program}`"
        ),
    )
}

fn sandbox(status: &str) -> Option<Fact> {
    const FILTERED: &str = "2";
    (value(status, "Seccomp") == Some(FILTERED)).then(|| {
        Fact::note(
            "sandbox",
            "a seccomp filter, as containers have, says which system calls this process may make",
        )
    })
}

fn landlock() -> Fact {
    let says = match missing() {
        Missing::Nothing => "`--sandbox` restricts the paths that a VM's process can open".to_owned(),
        Missing::Some(what) => {
            format!("`--sandbox` restricts paths, but this kernel's Landlock cannot restrict {what}")
        }
        Missing::All(why) => format!("`--sandbox` does not restrict paths: {why}"),
    };
    Fact::note("landlock", says)
}

fn files() -> Fact {
    open_files(getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX))
}

fn open_files(most: u64) -> Fact {
    let about = "files";
    match most.saturating_sub(FILES_OF_A_MACHINE) / FILES_OF_A_VCPU {
        0 => Fact::bad(
            about,
            format!("this process may have {most} files open, too few for a guest: `ulimit -n 4096`"),
        ),
        cpus => Fact::note(
            about,
            format!(
                "this process may have {most} files open, enough for {} vCPUs and their counters",
                cpus.min(254)
            ),
        ),
    }
}

fn value<'a>(status: &'a str, key: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':')).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fact::State;

    #[test]
    fn a_capability_is_found_by_its_bit() {
        assert!(has_perfmon("CapPrm:\t0\nCapEff:\t0000004000000000\n"));
        assert!(has_perfmon("CapEff:\t0000000000200000\n"));
        assert!(!has_perfmon("CapPrm:\t0000004000000000\nCapEff:\t0000000000000400\n"));
        let command = perfmon("CapEff:\t0\n").json()["commands"][0].clone();
        assert!(command.as_str().unwrap().starts_with("sudo setcap cap_perfmon+ep /"), "{command}");
    }

    #[test]
    fn a_sandbox_is_shown_only_if_there_is_one() {
        assert!(sandbox("Seccomp:\t2\n").is_some());
        assert!(sandbox("Seccomp:\t0\nSeccomp_filters:\t2\n").is_none());
    }

    #[test]
    fn a_limit_that_is_too_low_for_a_guest_is_bad() {
        assert_eq!(open_files(64).state, State::Bad);
        assert!(open_files(1024).says.contains("enough for 80 vCPUs"));
        assert!(open_files(1 << 20).says.contains("enough for 254 vCPUs"));
    }
}
