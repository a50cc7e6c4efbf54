//! Tests of `tally check` on the lab's simulated hosts, where every count is exact.

use guest_tests::host::{self, Host};
use guest_tests::lab::{OnEachHost, StepOutput, Steps};
use guest_tests::suite::{Test, on_intel, second_tier};
use guest_tests::tests;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    [
        tests![
            every_count_of_the_hosts_own_pmu_is_exact,
            every_count_of_every_pmu_is_exact,
            a_report_names_the_host_and_the_pmu,
            kvms_own_vpmu_is_refused,
        ],
        on_intel(tests![every_count_of_the_hosts_own_pmu_is_exact]),
        second_tier(on_intel(tests![every_count_of_every_pmu_is_exact, a_report_names_the_host_and_the_pmu])),
    ]
    .concat()
}

/// A PMU that is not the host's own.
struct Other {
    step: &'static str,
    options: &'static str,
    /// Number of counts: each counter alone, overflows and their interrupts, two events, all general counters at once,
    /// and samples.
    counts: usize,
    /// What the report says of the PMU.
    words: &'static str,
}

const AMD_LEGACY: Other = Other {
    step: "amd-legacy",
    options: "--pmu amd-legacy --counters 4",
    counts: 4 + 2 + 2 + 4 + 1,
    words: "AMD's PMU without PerfMonV2, 4 counters",
};

/// Returns the PMUs that are not the host's own, in the order of their steps.
fn others() -> [Other; 3] {
    match host::current() {
        Host::Amd => [
            AMD_LEGACY,
            Other {
                step: "intel",
                options: "--pmu intel",
                counts: 4 + 1 + 2 + 2 + 4 + 1,
                words: "Intel's PMU, version 5, 4 general and 2 fixed counters, absent events 0x1c",
            },
            Other {
                step: "intel-v2",
                options: "--pmu intel-v2 --counters 3",
                counts: 3 + 1 + 2 + 2 + 3 + 1,
                words: "Intel's PMU, version 2, 3 general and 2 fixed counters, absent events 0x1c",
            },
        ],
        Host::Intel => [
            AMD_LEGACY,
            Other {
                step: "amd",
                options: "--pmu amd",
                counts: 6 + 2 + 2 + 6 + 1,
                words: "AMD's PMU with PerfMonV2, 6 counters",
            },
            Other {
                step: "intel-v2",
                options: "--pmu intel-v2 --counters 3",
                counts: 3 + 1 + 2 + 2 + 3 + 1,
                words: "Intel's PMU, version 2, 3 general and 3 fixed counters, absent events 0x0",
            },
        ],
    }
}

static RESULTS: OnEachHost = OnEachHost::new(|| {
    let add_others = |steps: Steps| {
        others()
            .iter()
            .fold(steps, |steps, other| steps.step(other.step, &format!("./tally check {}", other.options)))
    };
    let steps = Steps::new("check").step("auto", "./tally check");
    match host::current() {
        Host::Amd => add_others(steps).step("without", "./tally check --pmu kvm"),
        Host::Intel => steps.second_tier(add_others),
    }
    .run()
});

/// Returns the verdicts. Checks their number.
fn verdicts(done: &StepOutput, number: usize) -> Vec<String> {
    let text = done.text();
    assert_eq!((done.status, done.err.as_str()), (0, ""), "{text}");
    let compared = text.lines().filter(|line| line.starts_with("  ") && line.contains(" of "));
    let verdicts: Vec<String> =
        compared.filter_map(|line| line.split_whitespace().last()).map(str::to_owned).collect();
    assert_eq!(verdicts.len(), number, "{text}");
    verdicts
}

fn assert_exact(step: &str, number: usize) {
    let done = RESULTS.of(step);
    assert!(verdicts(done, number).iter().all(|verdict| verdict == "exact"), "{step}: {}", done.text());
}

fn every_count_of_the_hosts_own_pmu_is_exact() {
    assert_exact(
        "auto",
        match host::current() {
            Host::Amd => 6 + 2 + 2 + 6 + 1,
            Host::Intel => 8 + 1 + 2 + 2 + 8 + 1,
        },
    );
}

fn every_count_of_every_pmu_is_exact() {
    for other in others() {
        assert_exact(other.step, other.counts);
    }
}

fn a_report_names_the_host_and_the_pmu() {
    let (family, own) = match host::current() {
        Host::Amd => ("family 23, model 49", "AMD's PMU with PerfMonV2, 6 counters"),
        Host::Intel => (
            "family 6, model 85",
            "Intel's PMU, version 5, 8 general and 3 fixed counters, absent events 0x0",
        ),
    };
    let all = others();
    let words = all.iter().map(|other| (other.step, other.words)).chain([("auto", own)]);
    for (step, words) in words {
        let text = RESULTS.of(step).text();
        assert!(text.contains(words), "{text}");
        assert!(text.contains("host   Linux ") && text.contains(family), "{text}");
    }
}

fn kvms_own_vpmu_is_refused() {
    let done = RESULTS.of("without");
    assert_eq!((done.status, done.text().as_str()), (125, ""));
    assert_eq!(done.err, "tally: --pmu kvm is no PMU of Tally's: there is nothing to check\n");
}
