//! Tests of policies with perf in the guest. One boot of the simulated host serves all tests, and each policy has a
//! guest of its own.

use std::fmt::Write;

use guest_tests::lab::{OnEachHost, Steps};
use guest_tests::model::{Model, selected_models};
use guest_tests::perf::{STAT, Script, Sections, Value};
use guest_tests::suite::{Test, on_intel, second_tier, third_tier};
use guest_tests::tests;
use tally_lab::programs::{LOOP, LOOP_BRANCHES, LOOP_INSTRUCTIONS};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    let of_intels_pmu = tests![a_denied_architectural_event_is_absent_from_intels_cpuid];
    let of_amds_pmu = tests![events_are_allowed_by_name_and_by_number_with_mask];
    let on_intels_host = on_intel([on_any_host(), of_intels_pmu.clone()].concat());
    [on_any_host(), of_amds_pmu, second_tier(of_intels_pmu), third_tier(on_intels_host)].concat()
}

pub fn on_any_host() -> Vec<Test> {
    tests![
        only_a_tiers_events_are_counted,
        a_period_below_the_minimum_is_raised_to_it,
        interrupts_are_rate_limited_and_counts_stay_exact,
        the_hosts_work_for_a_guest_is_counted_as_freeze_says,
    ]
}

/// Command that prints the number of samples in perf's recording.
const SAMPLES: &str =
    "perf report -i data --stats 2>/dev/null | awk '$2 == \"events:\" && $1 == \"SAMPLE\" { print $1, $3 }'";
/// Command that prints the time in hundredths of a second.
const UPTIME: &str = "awk '{ print \"TIME\", $1 * 100 }' /proc/uptime";

/// Minimum period of the policy.
const MIN_PERIOD: u64 = 1_000_000;
/// Period that the guest's perf requests.
const REQUESTED_PERIOD: u64 = 100;
/// Maximum number of interrupts per second of the policy.
const MAX_RATE: u64 = 50;
/// Maximum number of interrupts in a burst.
const BURST: u64 = 5;

type MakeScript = fn() -> Script;

/// Scripts of the guests, by name.
const SCRIPTS: [(&str, MakeScript); 5] =
    [("tier", tier), ("list", list), ("floor", floor), ("cap", cap), ("freeze", freeze)];

static RESULTS: OnEachHost = OnEachHost::new(|| {
    let floor = format!("min-period = {MIN_PERIOD}");
    let cap = format!("max-interrupts-per-second = {MAX_RATE}");
    let steps = SCRIPTS.iter().fold(Steps::new("policy").in_guest("loop", LOOP), |steps, (name, script)| {
        steps.in_guest(name, script().into_bytes())
    });
    selected_models()
        .iter()
        .fold(steps, |steps, Model { pmu, .. }| {
            let list = match *pmu {
                "amd" => r#"allow = ["instructions", "bus-cycles", "r00c2/00ff"]"#,
                _ => r#"allow = ["instructions", "bus-cycles", "r003c/00ff"]"#,
            };
            [
                ("tier", "tier", r#"tier = "architectural""#),
                ("list", "list", list),
                ("floor", "floor", floor.as_str()),
                ("cap", "cap", &cap),
                ("hybrid", "freeze", r#"freeze = "hybrid""#),
                ("host", "freeze", r#"freeze = "host""#),
            ]
            .into_iter()
            .fold(steps, |steps, (name, script, policy)| {
                let mut commands = String::new();
                let file = format!("{name}.{pmu}.toml");
                write!(
                    commands,
                    "echo '{policy}' >{file}\n\
                     ./tally run --pmu {pmu} --pmu-policy {file} -- sh ./{script}"
                )
                .expect("writing to a string cannot fail");
                steps.step(&format!("{name}.{pmu}"), &commands)
            })
        })
        .run()
});

fn tier() -> Script {
    Script::new()
        .section("allowed", &format!("{STAT} -e instructions:u,cycles:u,cycles:k,branches:u ./loop"))
        .section("denied", &format!("{STAT} -e r40:u,r4f2e:u,instructions:u ./loop"))
}

fn list() -> Script {
    Script::new()
        .section("by name", &format!("{STAT} -e instructions:u,branches:u,cycles:u ./loop"))
        .section("by number", &format!("{STAT} -e r76:u,r3c:u,rc2:u,r400c2:u,rc4:u ./loop"))
}

fn floor() -> Script {
    let record = format!(
        "perf record -q -N -o data -c {REQUESTED_PERIOD} -e instructions:u ./loop 2>/dev/null; {SAMPLES}"
    );
    Script::new()
        .section("recorded", &record)
        .section("counted", &format!("{STAT} -e instructions:u,branches:u ./loop"))
}

fn cap() -> Script {
    let record = format!(
        "{UPTIME}; perf record -q -N -o data -c 100000 -e instructions:u ./loop 2>/dev/null; {UPTIME}; {SAMPLES}"
    );
    Script::new()
        .section("recorded", &record)
        .section("counted", &format!("{STAT} -e instructions:u,branches:u ./loop"))
}

fn freeze() -> Script {
    Script::new().section("counted", &format!("{STAT} -e instructions:u,cycles:u,cycles:k ./loop"))
}

/// Returns the guest's output and Tally's messages.
fn guest(name: &str, pmu: &str) -> (Sections, &'static str) {
    let done = RESULTS.of(&format!("{name}.{pmu}"));
    assert_eq!(done.status, 0, "{name}, {pmu}: {}", done.err);
    (Sections::of(done), &done.err)
}

/// Returns perf's results for each event of a section, counted or not.
fn values(sections: &Sections, name: &str) -> Vec<Value> {
    sections.counts(name).iter().map(|count| count.value).collect()
}

fn only_a_tiers_events_are_counted() {
    for Model { pmu, .. } in selected_models() {
        let (sections, messages) = guest("tier", pmu);
        let [instructions, cycles, _, branches] = sections.values("allowed")[..] else {
            panic!("four events")
        };
        let expected = [LOOP_INSTRUCTIONS, LOOP_INSTRUCTIONS, LOOP_BRANCHES];
        assert_eq!([instructions, cycles, branches], expected, "{pmu}");
        assert_eq!(sections.values("denied"), [0, 0, LOOP_INSTRUCTIONS], "{pmu}");
        let denied = match *pmu {
            "amd" => "the policy denies r40:u (L1-dcache-loads)",
            _ => "the policy denies r4f2e:u (cache-references)",
        };
        assert_eq!(messages.matches(denied).count(), 1, "{pmu}: {messages}");
    }
}

fn events_are_allowed_by_name_and_by_number_with_mask() {
    let counted = Value::Counted;
    let (amd, messages) = guest("list", "amd");
    assert_eq!(values(&amd, "by name"), [LOOP_INSTRUCTIONS, LOOP_BRANCHES, 0].map(counted));
    assert_eq!(amd.values("by number"), [0, 0, LOOP_BRANCHES, LOOP_BRANCHES, 0]);
    assert!(
        messages.contains("the policy allows bus-cycles, but this PMU has no event of that name"),
        "{messages}"
    );
}

fn a_denied_architectural_event_is_absent_from_intels_cpuid() {
    let counted = Value::Counted;
    let (intel, messages) = guest("list", "intel");
    let expected = [counted(LOOP_INSTRUCTIONS), Value::NotSupported, counted(LOOP_INSTRUCTIONS)];
    assert_eq!(values(&intel, "by name"), expected, "CPUID says that branches are not to be had");
    assert_eq!(intel.values("by number"), [0, LOOP_INSTRUCTIONS, 0, 0, 0]);
    assert!(messages.contains("the policy denies rc4:u (branches)"), "{messages}");
    assert!(!messages.contains("bus-cycles"), "{messages}");
}

fn a_period_below_the_minimum_is_raised_to_it() {
    for Model { pmu, .. } in selected_models() {
        let (sections, messages) = guest("floor", pmu);
        assert_eq!(sections.numbers("recorded")["SAMPLE"], LOOP_INSTRUCTIONS / MIN_PERIOD, "{pmu}");
        assert_eq!(sections.values("counted"), [LOOP_INSTRUCTIONS, LOOP_BRANCHES], "{pmu}");
        assert_eq!(messages, "", "{pmu}");
    }
}

fn interrupts_are_rate_limited_and_counts_stay_exact() {
    for Model { pmu, .. } in selected_models() {
        let (sections, messages) = guest("cap", pmu);
        let text = sections.text("recorded");
        let numbers = |name: &str| -> Vec<u64> {
            let lines = text.lines().filter_map(|line| line.strip_prefix(name));
            lines.map(|number| number.trim().parse().expect("a number")).collect()
        };
        let (times, samples) = (numbers("TIME"), numbers("SAMPLE")[0]);
        let most = BURST + MAX_RATE * (times[1] - times[0] + 1) / 100 + 1;
        assert!((BURST..=most).contains(&samples), "{pmu}: {samples} of {most}");
        assert_eq!(sections.values("counted"), [LOOP_INSTRUCTIONS, LOOP_BRANCHES], "{pmu}");
        assert_eq!(messages, "", "{pmu}");
    }
}

fn the_hosts_work_for_a_guest_is_counted_as_freeze_says() {
    for Model { pmu, .. } in selected_models() {
        let counted = |name| {
            let values = guest(name, pmu).0.values("counted");
            <[u64; 3]>::try_from(values).expect("three events")
        };
        let of_the_kernel = guest("tier", pmu).0.values("allowed")[2];
        let [instructions, cycles, with_the_hosts] = counted("hybrid");
        assert_eq!(instructions, LOOP_INSTRUCTIONS, "{pmu}");
        assert!(
            cycles >= LOOP_INSTRUCTIONS && with_the_hosts > of_the_kernel,
            "{pmu}: {cycles}, {with_the_hosts}"
        );
        let [instructions, cycles, with_the_hosts] = counted("host");
        assert!(
            instructions >= LOOP_INSTRUCTIONS && cycles >= LOOP_INSTRUCTIONS,
            "{pmu}: {instructions}, {cycles}"
        );
        assert!(with_the_hosts > of_the_kernel, "{pmu}: {with_the_hosts}");
    }
}
