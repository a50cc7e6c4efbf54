//! Hostile guests: they write random values to registers and overflow without end. Registers must behave as documented,
//! and the host must stay responsive.

use guest_tests::lab::{StepOutput, Steps};
use guest_tests::suite::{Test, runs_second_tier};
use guest_tests::tests;
use tally_lab::programs::{LOOP, LOOP_INSTRUCTIONS};

use crate::pmu::{EMULATED, LONG, Pmu, QUICK, on_each, output};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    tests![
        random_register_writes_have_the_documented_effect,
        random_events_can_be_selected_and_overflow,
        floods_of_overflows_are_delivered,
        sigterm_ends_a_guest_that_only_overflows,
        a_rate_limited_flood_is_reported,
        a_program_on_the_same_cpu_keeps_half_of_it,
    ]
}

/// Shell expression for the time since the host's boot, in seconds with two decimals.
const NOW: &str = "$(cut -d ' ' -f 1 /proc/uptime)";

/// Guests that do nothing but overflow, and never end by themselves: name and words.
const FLOODS: [(&str, &str); 3] = [("flood", "flood=0"), ("flood-of-ones", "flood=1"), ("rearm", "rearm=0")];
/// Names of the steps that run the same guests beside a program on the same CPU.
const FLOODS_BESIDE: [&str; 3] = ["flood-beside", "flood-of-ones-beside", "rearm-beside"];
/// Further guests that never end, for the second tier.
const SECOND_TIER_GUESTS: [(&str, &str); 3] =
    [("changes", "reprogram=5"), ("flood-by-two", "smp=2 flood=16"), ("changes-by-two", "smp=2 reprogram=5")];

/// Returns the PMUs of the guests that never end: AMD's newest, and in the second tier also Intel's newest.
fn endless_pmus() -> impl Iterator<Item = Pmu> {
    [Pmu::V2, Pmu::Intel].into_iter().take(if runs_second_tier() { 2 } else { 1 })
}

fn second_tier_guests() -> impl Iterator<Item = (&'static str, &'static str)> + Clone {
    SECOND_TIER_GUESTS.into_iter().filter(|_| runs_second_tier())
}

/// Number of times that the program beside a guest runs, on the host's only CPU.
const NEIGHBOUR_RUNS: u64 = 2;

pub fn guests(steps: Steps) -> Steps {
    let steps = on_each(steps, &EMULATED, "nonsense", "fuzz-msrs=1,2000");
    let steps = on_each(steps, &EMULATED, "nonsense-by-two", "smp=2 fuzz-msrs=2,1000");
    let steps = on_each(steps, &EMULATED, "changes", "smp=2 reprogram=1,2000");
    let floods = "smp=2 flood=1,500 flood=16,500 flood=0,500 rearm=500 x2apic flood=0,500";
    on_each(steps, &EMULATED, "some-floods", floods)
}

pub fn endless_guests(steps: Steps) -> Steps {
    let steps = steps.configure_host(|host| host.program(LOOP, "loop"));
    endless_pmus().fold(steps, |steps, pmu| {
        let guest =
            |words| format!("./tally run --kernel payload {} --append '{words}' & sleep 0.5", pmu.options());
        let steps = FLOODS.into_iter().chain(second_tier_guests()).fold(steps, |steps, (name, words)| {
            let end = format!(
                "begun={NOW}; kill $!; wait $!; status=$?; awk \"BEGIN {{ print ({NOW} - $begun < 1) }}\"; exit $status"
            );
            steps.step(&pmu.step(name), &format!("{}; {end}", guest(words)))
        });
        let work = format!("for i in $(seq {NEIGHBOUR_RUNS}); do ./loop; done");
        FLOODS_BESIDE.into_iter().zip(FLOODS).fold(steps, |steps, (name, (_, words))| {
            let neighbour = format!("begun={NOW}; {work}; awk \"BEGIN {{ print {NOW} - $begun }}\"");
            steps.step(&pmu.step(name), &format!("{}; {neighbour}; kill $!; wait $!", guest(words)))
        })
    })
}

/// Returns what a guest with random events printed. An AMD host lacks most of Intel's events, and Tally reports them.
fn printed(pmu: Pmu, name: &str) -> String {
    let done = QUICK.of(&pmu.step(name));
    if !pmu.is_intel() {
        return output(done);
    }
    let expected = |line: &str| line.contains(" stands still: ") || line.contains(": too many notices: ");
    assert!(done.status == 1 && done.err.lines().all(expected), "{pmu:?}: {}{}", done.text(), done.err);
    done.text()
}

fn random_register_writes_have_the_documented_effect() {
    for pmu in EMULATED {
        for name in ["nonsense", "nonsense-by-two"] {
            let text = printed(pmu, name);
            assert!(text.contains(" 0 surprises\n") && !text.contains("surprise "), "{pmu:?}: {text}");
        }
    }
}

fn random_events_can_be_selected_and_overflow() {
    for pmu in EMULATED {
        let text = printed(pmu, "changes");
        let changes: Vec<_> =
            text.lines().filter(|line| line.starts_with("reprogram 2000 changes, ")).collect();
        assert_eq!(changes.len(), 2, "{pmu:?}: {text}");
        assert!(changes.iter().all(|line| !line.contains(", 0 interrupts")), "{pmu:?}: {text}");
    }
}

fn floods_of_overflows_are_delivered() {
    for pmu in EMULATED {
        let done = QUICK.of(&pmu.step("some-floods"));
        let over = "flood over\n";
        let text = format!("processors 2\n{}rearm over\n{over}", over.repeat(3));
        assert_eq!(done.text(), text, "{pmu:?}: {}", done.err);
    }
}

/// Returns the step's name and the result for each of these endless guests and each PMU.
fn endless(
    guests: impl Iterator<Item = &'static str> + Clone,
) -> impl Iterator<Item = (String, &'static StepOutput)> {
    let steps = endless_pmus().flat_map(move |pmu| guests.clone().map(move |name| pmu.step(name)));
    steps.map(|step| {
        let done = LONG.of(&step);
        (step, done)
    })
}

fn sigterm_ends_a_guest_that_only_overflows() {
    for (name, done) in endless(FLOODS.into_iter().chain(second_tier_guests()).map(|(name, _)| name)) {
        assert_eq!(done.status, 0, "{name}: {}", done.err);
        assert!(done.text().ends_with("1\n"), "{name}: it was not gone within a second: {}", done.text());
    }
}

fn a_rate_limited_flood_is_reported() {
    for (name, done) in endless(FLOODS.into_iter().map(|(name, _)| name)) {
        assert!(done.err.starts_with("tally: vCPU 0: rate floor: "), "{name}: {}", done.err);
    }
}

fn a_program_on_the_same_cpu_keeps_half_of_it() {
    for (name, done) in endless(FLOODS_BESIDE.into_iter()) {
        let text = done.text();
        let elapsed: f64 =
            text.lines().last().and_then(|line| line.parse().ok()).expect("a number of seconds");
        // One instruction is one nanosecond.
        #[expect(clippy::cast_precision_loss, reason = "it has ten digits")]
        let alone = (NEIGHBOUR_RUNS * LOOP_INSTRUCTIONS) as f64 / 1e9;
        let share = alone / elapsed;
        assert!((0.4..0.6).contains(&share), "{name}: {share:.2} of the CPU");
    }
}
