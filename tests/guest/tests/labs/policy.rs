//! What a guest has of its counters under a policy, as its own perf finds it. One boot of the simulated host serves all tests, and
//! each policy has a guest of its own.

use std::fmt::Write;
use std::sync::LazyLock;

use guest_tests::lab::{Results, Steps};
use guest_tests::model::{Model, selected_models};
use guest_tests::perf::{STAT, Script, Sections, Value};
use guest_tests::suite::{Test, second_tier};
use guest_tests::tests;
use tally_lab::programs::{LOOP, LOOP_BRANCHES, LOOP_INSTRUCTIONS};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    [
        tests![
            what_a_tier_has_is_counted_and_nothing_else,
            what_is_listed_is_counted_by_name_or_by_a_mask_of_its_number,
            a_period_below_the_floor_takes_as_many_samples_as_the_floor,
            there_are_no_more_interrupts_than_the_cap_has_and_counts_stay_exact,
            what_the_host_does_for_a_guest_counts_as_the_policy_says,
        ],
        second_tier(tests![an_architectural_event_that_is_not_listed_is_absent_for_intels,]),
    ]
    .concat()
}

/// How many samples there are in what perf has recorded.
const SAMPLES: &str =
    "perf report -i data --stats 2>/dev/null | awk '$2 == \"events:\" && $1 == \"SAMPLE\" { print $1, $3 }'";
/// The time, in hundredths of a second.
const UPTIME: &str = "awk '{ print \"TIME\", $1 * 100 }' /proc/uptime";

/// The least period that is allowed, and what is asked for.
const FLOOR: u64 = 1_000_000;
const BELOW_THE_FLOOR: u64 = 100;
/// How many interrupts a second has, and how many of them may come at once.
const CAP: u64 = 50;
const AT_ONCE: u64 = 5;

type MakeScript = fn() -> Script;

/// What each guest runs.
const SCRIPTS: [(&str, MakeScript); 5] =
    [("tier", tier), ("list", list), ("floor", floor), ("cap", cap), ("freeze", freeze)];

static RESULTS: LazyLock<Results> = LazyLock::new(|| {
    let floor = format!("min-period = {FLOOR}");
    let cap = format!("max-interrupts-per-second = {CAP}");
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
                     ./tally run --append cryptomgr.notests --pmu {pmu} --pmu-policy {file} -- sh ./{script}"
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
        "perf record -q -N -o data -c {BELOW_THE_FLOOR} -e instructions:u ./loop 2>/dev/null; {SAMPLES}"
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

/// What a guest printed, and what Tally said.
fn guest(name: &str, pmu: &str) -> (Sections, &'static str) {
    let done = RESULTS.of(&format!("{name}.{pmu}"));
    assert_eq!(done.status, 0, "{name}, {pmu}: {}", done.err);
    (Sections::of(done), &done.err)
}

/// How often perf counted events that it takes, whatever comes of it.
fn values(sections: &Sections, name: &str) -> Vec<Value> {
    sections.counts(name).iter().map(|count| count.value).collect()
}

fn what_a_tier_has_is_counted_and_nothing_else() {
    for Model { pmu, .. } in selected_models() {
        let (sections, told) = guest("tier", pmu);
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
        assert_eq!(told.matches(denied).count(), 1, "{pmu}: {told}");
    }
}

fn what_is_listed_is_counted_by_name_or_by_a_mask_of_its_number() {
    let counted = Value::Counted;
    let (amd, told) = guest("list", "amd");
    assert_eq!(values(&amd, "by name"), [LOOP_INSTRUCTIONS, LOOP_BRANCHES, 0].map(counted));
    assert_eq!(amd.values("by number"), [0, 0, LOOP_BRANCHES, LOOP_BRANCHES, 0]);
    assert!(told.contains("the policy allows bus-cycles, which no event of this PMU is called"), "{told}");
}

fn an_architectural_event_that_is_not_listed_is_absent_for_intels() {
    let counted = Value::Counted;
    let (intel, told) = guest("list", "intel");
    let expected = [counted(LOOP_INSTRUCTIONS), Value::NotSupported, counted(LOOP_INSTRUCTIONS)];
    assert_eq!(values(&intel, "by name"), expected, "CPUID says that branches are not to be had");
    assert_eq!(intel.values("by number"), [0, LOOP_INSTRUCTIONS, 0, 0, 0]);
    assert!(told.contains("the policy denies rc4:u (branches)"), "{told}");
    assert!(!told.contains("bus-cycles"), "{told}");
}

fn a_period_below_the_floor_takes_as_many_samples_as_the_floor() {
    for Model { pmu, .. } in selected_models() {
        let (sections, told) = guest("floor", pmu);
        assert_eq!(sections.tally("recorded")["SAMPLE"], LOOP_INSTRUCTIONS / FLOOR, "{pmu}");
        assert_eq!(sections.values("counted"), [LOOP_INSTRUCTIONS, LOOP_BRANCHES], "{pmu}");
        assert_eq!(told, "", "{pmu}");
    }
}

fn there_are_no_more_interrupts_than_the_cap_has_and_counts_stay_exact() {
    for Model { pmu, .. } in selected_models() {
        let (sections, told) = guest("cap", pmu);
        let text = sections.text("recorded");
        let numbers = |name: &str| -> Vec<u64> {
            let lines = text.lines().filter_map(|line| line.strip_prefix(name));
            lines.map(|number| number.trim().parse().expect("a number")).collect()
        };
        let (times, samples) = (numbers("TIME"), numbers("SAMPLE")[0]);
        let most = AT_ONCE + CAP * (times[1] - times[0] + 1) / 100 + 1;
        assert!((AT_ONCE..=most).contains(&samples), "{pmu}: {samples} of {most}");
        assert_eq!(sections.values("counted"), [LOOP_INSTRUCTIONS, LOOP_BRANCHES], "{pmu}");
        assert_eq!(told, "", "{pmu}");
    }
}

fn what_the_host_does_for_a_guest_counts_as_the_policy_says() {
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
