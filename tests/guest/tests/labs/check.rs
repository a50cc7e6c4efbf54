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
            a_report_as_json_has_all_of_it,
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
        Host::Amd => {
            add_others(steps).step("json", "./tally check --json").step("without", "./tally check --pmu kvm")
        }
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

/// On this host an interrupt comes at the next instruction.
fn a_report_as_json_has_all_of_it() {
    let done = RESULTS.of("json");
    let report: serde_json::Value =
        serde_json::from_str(&done.text()).unwrap_or_else(|_| panic!("{}", done.text()));
    let counts = 6 + 2 + 2 + 6 + 1;
    assert_eq!((done.status, &report["exact"], &report["wrong"]), (0, &counts.into(), &0.into()), "{report}");
    assert_eq!(report["counts"].as_array().map(Vec::len), Some(counts));
    for count in report["counts"].as_array().into_iter().flatten() {
        assert_eq!(count["found"], count["right"], "{count}");
    }
    let measured = report["measured"].as_array().expect("it is a list");
    let [instructions, branches, way] = &measured[..] else { panic!("{report}") };
    let distribution = |of: &serde_json::Value| {
        ["number", "least", "median", "percentile_99", "most"]
            .map(|field| of[field].as_u64().unwrap_or(u64::MAX))
    };
    assert_eq!(distribution(instructions), [1000, 0, 0, 0, 0], "{report}");
    assert_eq!(distribution(branches), [500, 0, 0, 0, 0], "{report}");
    let [number, least, median, percentile_99, most] = distribution(way);
    assert_eq!(number, 1000, "{report}");
    // An exit alone takes more than a microsecond of this host's time.
    assert!(1000 < least && least <= median && median <= percentile_99 && percentile_99 <= most, "{report}");
    let number = |what: &str| {
        let numbers = report["numbers"].as_array().into_iter().flatten();
        numbers
            .filter(|number| number["what"].as_str() == Some(what))
            .find_map(|number| number["found"].as_u64())
    };
    assert!(number("alarms that found nothing to do").is_some_and(|ignored| ignored < 10), "{report}");
    assert!(number("alarms from the host's events") >= Some(3500), "{report}");
    assert_eq!(number("samples a second that it allowed afterwards"), Some(100_000), "{report}");
}

fn kvms_own_vpmu_is_refused() {
    let done = RESULTS.of("without");
    assert_eq!((done.status, done.text().as_str()), (125, ""));
    assert_eq!(done.err, "tally: --pmu kvm is no PMU of Tally's: there is nothing to check\n");
}
