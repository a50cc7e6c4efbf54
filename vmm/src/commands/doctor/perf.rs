//! Facts about the host's counters: whether guests can have them, and how many.

use std::fs;
use std::io;

use tally_machine::pmu::{Choice, Offer, Pmu, offer, processor};
use vpmu::policy::Policy;
use vpmu_perf::{HostPmu, Needed, Obstacle, PARANOID, Rights, WATCHDOG, generic_events};

use super::holders;
use crate::host::entry_ticks::Entries;
use crate::host::fact::Fact;
use crate::host::kvm;

/// Returns the facts about counters.
pub fn facts() -> Vec<Fact> {
    let mut facts = vec![paranoid(vpmu_perf::paranoid(), Rights::of_this_process())];
    facts.extend(WATCHDOG.map(watchdog));
    facts.extend(holders::fact());
    facts.extend(direct_reads(fs::read_to_string("/sys/bus/event_source/devices/cpu/rdpmc").ok().as_deref()));
    facts.extend(shown());
    // On a hybrid host, these are the events of the kind of core on which this program stays from now on.
    facts.extend(HostPmu::bind_thread().ok().map(|(pmu, _)| events(&generic_events(pmu))));
    facts
}

fn value(switch: &str) -> Option<i32> {
    fs::read_to_string(switch).ok()?.trim().parse().ok()
}

/// Returns whom this kernel lets count in guests, and what helps a user whom it does not. Whether it lets this process
/// is tried by [`shown`].
fn paranoid(level: Option<i32>, rights: Rights) -> Fact {
    let about = "perf";
    let Some(level) = level else {
        return Fact::bad(about, "this kernel has no perf events (CONFIG_PERF_EVENTS)");
    };
    let says = match Needed::at(level) {
        Needed::Nothing => "everybody may count in guests".to_owned(),
        needed if rights.suffice_for(needed) => {
            format!(
                "only those with {} may count in a guest's kernel, and this process has it",
                needed.name()
            )
        }
        needed => format!("{}; {}", needed.refusal(), needed.remedy()),
    };
    Fact::note(about, format!("{PARANOID} is {level}: {says}"))
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
        Ok(Offer { pmu: mut pmu @ Pmu::Emulated(shown, _), remarks }) => {
            let good = Fact::good(about, format!("guests see {shown}"));
            let remarks = remarks.into_iter().map(|remark| Fact::note(about, remark));
            let entries = Entries::leave_out(&mut pmu).says().map(|says| Fact::note("entries", says));
            [good].into_iter().chain(remarks).chain(entries).collect()
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
    use crate::host::fact::State;

    #[test]
    fn who_may_count_is_shown_with_what_helps_those_who_may_not() {
        let commands = |level, rights| paranoid(Some(level), rights).json()["commands"].clone();
        let none = Rights { perfmon: false, sys_admin: false };
        let perfmon = Rights { perfmon: true, ..none };
        let admin = Rights { sys_admin: true, ..none };
        let of =
            |level| [none, perfmon, admin].map(|rights| commands(level, rights).as_array().unwrap().len());
        assert_eq!([-1, 0, 1].map(of), [[0; 3]; 3]);
        assert_eq!(of(2), [2, 0, 0], "a setting, or a capability");
        assert_eq!([3, 4].map(of), [[1, 1, 0]; 2], "the setting alone");
        for level in [2, 3, 4] {
            assert_eq!(commands(level, none)[0], "sudo sysctl kernel.perf_event_paranoid=1");
        }
        assert_eq!(paranoid(None, admin).state, State::Bad);
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
