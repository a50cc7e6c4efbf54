//! Facts about this process: its sandbox and its limits.

use std::fs;

use rustix::process::{Resource, getrlimit};
use vpmu_perf::{MORE_PAGES, PageLimits};

use crate::host::fact::Fact;
use crate::sandbox::{Missing, missing};

/// Files of a vCPU: itself and one for each of its counters. A machine has some tens.
const FILES_OF_A_VCPU: u64 = 12;
/// Events of a vCPU that counts with as many counters as most processors have.
const COUNTERS_OF_A_VCPU: u64 = 6;
const FILES_OF_A_MACHINE: u64 = 64;

/// Returns the facts about this process.
pub fn facts() -> Vec<Fact> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    [sandbox(&status), Some(landlock()), Some(files()), Some(pages(PageLimits::of_this_process()))]
        .into_iter()
        .flatten()
        .collect()
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

/// Returns how many vCPUs can have all of their counters' pages mapped.
fn pages(limits: Option<PageLimits>) -> Fact {
    let about = "pages";
    let Some(limits) = limits else {
        return Fact::note(about, "any number of counters can be read without a system call");
    };
    Fact::note(
        about,
        format!(
            "the counters of {} vCPUs of a VM can be read without a system call ({COUNTERS_OF_A_VCPU} each; the VMs of a \
             user share {} of them): those of more are as exact, but read by system calls; `{MORE_PAGES}` lets users map \
             more pages",
            limits.threads(COUNTERS_OF_A_VCPU),
            limits.of_user / COUNTERS_OF_A_VCPU,
        ),
    )
}

fn value<'a>(status: &'a str, key: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':')).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::fact::State;

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

    #[test]
    fn the_vcpus_whose_pages_fit_are_counted() {
        let fact = pages(Some(PageLimits { of_user: 129, of_process: 16 }));
        assert!(fact.says.starts_with("the counters of 24 vCPUs of a VM can be read"), "{fact}");
        assert!(fact.says.contains("the VMs of a user share 21 of them"), "{fact}");
        assert_eq!(fact.json()["commands"], serde_json::json!([MORE_PAGES]));
        assert!(!pages(None).says.contains('`'));
    }
}
