//! The host's counters: whether guests can have them, and how many.

use std::fs;

use vpmu::event::{Event, Meaning};
use vpmu::source::perf::{HostPmu, exists};

use super::fact::Fact;
use crate::pmu::{Choice, Offer, Pmu, offer};
use crate::{cpuid, kvm};

/// What a guest of any vendor may ask for.
const MEANINGS: [Meaning; 5] = [
    Meaning::Cycles,
    Meaning::Instructions,
    Meaning::Branches,
    Meaning::BranchMisses,
    Meaning::ReferenceCycles,
];

/// What there is to know of them.
pub fn facts() -> Vec<Fact> {
    let mut facts = vec![paranoid(), watchdog()];
    facts.extend(shown());
    // Those of one kind of cores: by now this program stays there.
    facts.extend(HostPmu::settle().ok().map(|(pmu, _)| events(pmu)));
    facts
}

fn setting(name: &str) -> Option<i64> {
    fs::read_to_string(format!("/proc/sys/kernel/{name}")).ok()?.trim().parse().ok()
}

fn paranoid() -> Fact {
    let about = "perf";
    match setting("perf_event_paranoid") {
        None => Fact::bad(about, "this kernel has no perf events (CONFIG_PERF_EVENTS)"),
        Some(level) if level > 1 => Fact::note(
            about,
            format!(
                "kernel.perf_event_paranoid is {level}: only the privileged (CAP_PERFMON) may count in a kernel"
            ),
        ),
        Some(level) => {
            Fact::note(about, format!("kernel.perf_event_paranoid is {level}: everybody may count"))
        }
    }
}

fn watchdog() -> Fact {
    let about = "watchdog";
    match setting("nmi_watchdog") {
        Some(1) => Fact::note(
            about,
            "the NMI watchdog is on and holds one counter of every CPU: `sudo sysctl kernel.nmi_watchdog=0` frees it",
        ),
        _ => Fact::note(about, "the NMI watchdog is off and holds no counter"),
    }
}

/// What a guest sees if nothing else is asked for.
fn shown() -> Vec<Fact> {
    let about = "pmu";
    let Ok(kvm) = kvm::open(Choice::Auto) else { return Vec::new() };
    let offer = match cpuid::host_vendor(&kvm) {
        Ok(vendor) => offer(Choice::Auto, None, vendor),
        Err(error) => return vec![Fact::bad(about, error.to_string())],
    };
    match offer {
        Ok(Offer { pmu: Pmu::Ours(shown, _), remarks }) => {
            let good = Fact::good(about, format!("guests see {shown}"));
            [good].into_iter().chain(remarks.into_iter().map(|remark| Fact::note(about, remark))).collect()
        }
        Ok(Offer { remarks, .. }) => remarks.into_iter().map(|remark| Fact::bad(about, remark)).collect(),
        Err(error) => vec![Fact::bad(about, error.to_string())],
    }
}

fn events(pmu: HostPmu) -> Fact {
    let names = |there: bool| {
        let names = MEANINGS.into_iter().filter(|meaning| exists(pmu, Event::Meaning(*meaning)) == there);
        names.map(|meaning| meaning.to_string()).collect::<Vec<_>>().join(", ")
    };
    let about = "events";
    match (names(true).as_str(), names(false).as_str()) {
        ("", lacking) => Fact::bad(about, format!("the host counts none of {lacking} in guests")),
        (counted, "") => Fact::good(about, format!("the host counts {counted} in guests")),
        (counted, lacking) => {
            Fact::good(about, format!("the host counts {counted} in guests, not {lacking}"))
        }
    }
}
