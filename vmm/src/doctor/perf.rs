//! Facts about the host's counters: whether guests can have them, and how many.

use std::fs;
use std::io;

use tally_machine::pmu::{Choice, Offer, Pmu, offer, processor};
use vpmu::policy::Policy;
use vpmu_perf::{HostPmu, Obstacle, WATCHDOG, generic_events};

use super::{holders, process};
use crate::fact::Fact;
use crate::kvm;

/// Returns the facts about counters.
pub fn facts() -> Vec<Fact> {
    let mut facts = vec![paranoid(setting("perf_event_paranoid"), process::is_privileged())];
    facts.extend(WATCHDOG.map(watchdog));
    facts.extend(holders::fact());
    facts.extend(direct_reads(fs::read_to_string("/sys/bus/event_source/devices/cpu/rdpmc").ok().as_deref()));
    facts.extend(shown());
    // On a hybrid host, these are the events of the kind of core on which this program stays from now on.
    facts.extend(HostPmu::bind_thread().ok().map(|(pmu, _)| events(&generic_events(pmu))));
    facts
}

fn setting(name: &str) -> Option<i64> {
    value(&format!("/proc/sys/kernel/{name}"))
}

fn value(switch: &str) -> Option<i64> {
    fs::read_to_string(switch).ok()?.trim().parse().ok()
}

fn paranoid(level: Option<i64>, is_privileged: bool) -> Fact {
    let about = "perf";
    let Some(level) = level else {
        return Fact::bad(about, "this kernel has no perf events (CONFIG_PERF_EVENTS)");
    };
    let says = match level {
        ..2 => "everybody may count in guests",
        _ if is_privileged => {
            "only those with CAP_PERFMON may count in a guest's kernel, and this process has it"
        }
        _ => {
            "only those with CAP_PERFMON may count in a guest's kernel; to let everybody: \
             `sudo sysctl kernel.perf_event_paranoid=1`"
        }
    };
    Fact::note(about, format!("kernel.perf_event_paranoid is {level}: {says}"))
}

fn watchdog(switch: &str) -> Fact {
    let about = "watchdog";
    match value(switch) {
        Some(1) => Fact::note(
            about,
            "the NMI watchdog is on and holds one counter of every CPU: `sudo sysctl kernel.nmi_watchdog=0` frees it",
        ),
        _ => Fact::note(about, "the NMI watchdog is off and holds no counter"),
    }
}

/// Returns whether Tally can read its counters without a system call.
fn direct_reads(rdpmc: Option<&str>) -> Option<Fact> {
    let about = "rdpmc";
    match rdpmc?.trim() {
        "0" => Some(Fact::note(
            about,
            "programs may not read counters by RDPMC, so that each reading is a system call; to let them: \
             `echo 1 | sudo tee /sys/bus/event_source/devices/cpu/rdpmc`",
        )),
        _ => Some(Fact::note(about, "programs may read their counters by RDPMC, without a system call")),
    }
}

/// Returns the PMU that a guest sees by default.
fn shown() -> Vec<Fact> {
    let about = "pmu";
    if kvm::open(Choice::Auto).is_err() {
        return Vec::new();
    }
    match offer(Choice::Auto, None, processor(), &Policy::default()) {
        Ok(Offer { pmu: Pmu::Emulated(shown, _), remarks }) => {
            let good = Fact::good(about, format!("guests see {shown}"));
            [good].into_iter().chain(remarks.into_iter().map(|remark| Fact::note(about, remark))).collect()
        }
        Ok(Offer { remarks, .. }) => remarks.into_iter().map(|remark| Fact::bad(about, remark)).collect(),
        Err(error) => vec![Fact::bad(about, error.to_string())],
    }
}

fn events(events: &[(&str, io::Result<()>)]) -> Fact {
    let about = "events";
    let names = |counted: bool| {
        let names = events.iter().filter(|(_, answer)| answer.is_ok() == counted).map(|(name, _)| *name);
        names.collect::<Vec<_>>().join(", ")
    };
    let refusal = events.iter().find_map(|(_, answer)| answer.as_ref().err());
    match (names(true), refusal) {
        (none, Some(refusal)) if none.is_empty() => {
            Fact::bad(about, format!("none can be counted in guests: {}", Obstacle::from_error(refusal)))
        }
        (counted, None) => Fact::good(about, format!("the host counts in guests {counted}")),
        (counted, Some(_)) => {
            Fact::good(about, format!("the host counts in guests {counted}; not {}", names(false)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fact::State;

    #[test]
    fn who_may_count_is_shown_with_the_command_for_those_who_may_not() {
        let commands = |level, privileged| paranoid(Some(level), privileged).json()["commands"].clone();
        assert_eq!(commands(3, false)[0], "sudo sysctl kernel.perf_event_paranoid=1");
        assert!(commands(3, true).as_array().unwrap().is_empty());
        assert!(commands(1, false).as_array().unwrap().is_empty());
        assert_eq!(paranoid(None, true).state, State::Bad);
    }

    #[test]
    fn a_host_that_counts_nothing_is_bad_and_says_why() {
        let refused = |errno| Err(io::Error::from_raw_os_error(errno));
        let nothing = events(&[("cycles", refused(libc::EPERM))]);
        assert!(nothing.state == State::Bad && nothing.says.contains("seccomp"), "{nothing}");
        let some = events(&[("cycles", Ok(())), ("bus-cycles", refused(libc::ENOENT))]);
        assert_eq!(some.says, "the host counts in guests cycles; not bus-cycles");
    }

    #[test]
    fn reads_by_system_call_are_shown_with_the_command_that_avoids_them() {
        assert!(direct_reads(Some("0\n")).unwrap().says.contains("`echo 1 | sudo tee"));
        assert!(!direct_reads(Some("1\n")).unwrap().says.contains('`'));
        assert_eq!(direct_reads(None), None);
    }
}
