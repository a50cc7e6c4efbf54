//! Guests that mean harm: they get what the registers promise and no more, and the host keeps its own.

use guest_tests::lab::{StepOutput, Steps};
use guest_tests::suite::{Test, runs_second_tier};
use guest_tests::tests;
use tally_lab::programs::{LOOP, LOOP_INSTRUCTIONS};

use crate::pmu::{LONG, OURS, Pmu, QUICK, on_each, output};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    tests![
        nonsense_in_every_register_changes_what_the_manual_says,
        random_events_come_and_go,
        a_flood_gets_through,
        sigterm_ends_a_guest_that_does_nothing_but_overflow,
        the_operator_hears_of_a_flood_that_is_held_back,
        a_neighbour_on_the_same_cpu_keeps_its_half,
    ]
}

/// In a shell: the time since the host's boot in seconds, with hundredths.
const NOW: &str = "$(cut -d ' ' -f 1 /proc/uptime)";

/// Guests that do nothing but overflow, and never end by themselves.
const FLOODS: [(&str, &str); 3] = [("flood", "flood=0"), ("flood-of-ones", "flood=1"), ("rearm", "rearm=0")];
/// The same beside a neighbour.
const FLOODS_BESIDE: [&str; 3] = ["flood-beside", "flood-of-ones-beside", "rearm-beside"];
/// Others that never end, for the second tier.
const OTHERS: [(&str, &str); 3] =
    [("changes", "reprogram=5"), ("flood-by-two", "smp=2 flood=16"), ("changes-by-two", "smp=2 reprogram=5")];

/// The PMUs of those that never end: the newest of each vendor's, and one in the first tier.
fn endless_pmus() -> impl Iterator<Item = Pmu> {
    [Pmu::V2, Pmu::Intel].into_iter().take(if runs_second_tier() { 2 } else { 1 })
}

fn others() -> impl Iterator<Item = (&'static str, &'static str)> + Clone {
    OTHERS.into_iter().filter(|_| runs_second_tier())
}

/// How often a neighbour runs its loop on the host's only CPU.
const NEIGHBOURS_LOOPS: u64 = 2;

pub fn guests(steps: Steps) -> Steps {
    let steps = on_each(steps, &OURS, "nonsense", "fuzz-msrs=1,2000");
    let steps = on_each(steps, &OURS, "nonsense-by-two", "smp=2 fuzz-msrs=2,1000");
    let steps = on_each(steps, &OURS, "changes", "smp=2 reprogram=1,2000");
    let floods = "smp=2 flood=1,500 flood=16,500 flood=0,500 rearm=500 x2apic flood=0,500";
    on_each(steps, &OURS, "some-floods", floods)
}

pub fn endless_guests(steps: Steps) -> Steps {
    let steps = steps.configure_host(|host| host.program(LOOP, "loop"));
    endless_pmus().fold(steps, |steps, pmu| {
        let guest =
            |words| format!("./tally run --kernel payload {} --append '{words}' & sleep 0.5", pmu.options());
        let steps = FLOODS.into_iter().chain(others()).fold(steps, |steps, (name, words)| {
            let end = format!(
                "begun={NOW}; kill $!; wait $!; status=$?; awk \"BEGIN {{ print ({NOW} - $begun < 1) }}\"; exit $status"
            );
            steps.step(&pmu.step(name), &format!("{}; {end}", guest(words)))
        });
        let work = format!("for i in $(seq {NEIGHBOURS_LOOPS}); do ./loop; done");
        FLOODS_BESIDE.into_iter().zip(FLOODS).fold(steps, |steps, (name, (_, words))| {
            let neighbour = format!("begun={NOW}; {work}; awk \"BEGIN {{ print {NOW} - $begun }}\"");
            steps.step(&pmu.step(name), &format!("{}; {neighbour}; kill $!; wait $!", guest(words)))
        })
    })
}

/// What a guest printed that tried events at random. An AMD host has none of most of Intel's, and Tally says so.
fn said(pmu: Pmu, name: &str) -> String {
    let done = QUICK.of(&pmu.step(name));
    if !pmu.is_intel() {
        return output(done);
    }
    let expected = |line: &str| line.contains(" stands still: ") || line.contains(" no more of it is told");
    assert!(done.status == 1 && done.err.lines().all(expected), "{pmu:?}: {}{}", done.text(), done.err);
    done.text()
}

fn nonsense_in_every_register_changes_what_the_manual_says() {
    for pmu in OURS {
        for name in ["nonsense", "nonsense-by-two"] {
            let text = said(pmu, name);
            assert!(text.contains(" 0 surprises\n") && !text.contains("surprise "), "{pmu:?}: {text}");
        }
    }
}

fn random_events_come_and_go() {
    for pmu in OURS {
        let text = said(pmu, "changes");
        let changes: Vec<_> =
            text.lines().filter(|line| line.starts_with("reprogram 2000 changes, ")).collect();
        assert_eq!(changes.len(), 2, "{pmu:?}: {text}");
        assert!(changes.iter().all(|line| !line.contains(", 0 interrupts")), "{pmu:?}: {text}");
    }
}

fn a_flood_gets_through() {
    for pmu in OURS {
        let done = QUICK.of(&pmu.step("some-floods"));
        let over = "flood over\n";
        let text = format!("processors 2\n{}rearm over\n{over}", over.repeat(3));
        assert_eq!(done.text(), text, "{pmu:?}: {}", done.err);
    }
}

/// What each of these endless guests did, and what it and its PMU are called.
fn endless(
    guests: impl Iterator<Item = &'static str> + Clone,
) -> impl Iterator<Item = (String, &'static StepOutput)> {
    let steps = endless_pmus().flat_map(move |pmu| guests.clone().map(move |name| pmu.step(name)));
    steps.map(|step| {
        let done = LONG.of(&step);
        (step, done)
    })
}

fn sigterm_ends_a_guest_that_does_nothing_but_overflow() {
    for (name, done) in endless(FLOODS.into_iter().chain(others()).map(|(name, _)| name)) {
        assert_eq!(done.status, 0, "{name}: {}", done.err);
        assert!(done.text().ends_with("1\n"), "{name}: it was not gone within a second: {}", done.text());
    }
}

fn the_operator_hears_of_a_flood_that_is_held_back() {
    for (name, done) in endless(FLOODS.into_iter().map(|(name, _)| name)) {
        assert!(done.err.starts_with("tally: vCPU 0: rate floor: "), "{name}: {}", done.err);
    }
}

fn a_neighbour_on_the_same_cpu_keeps_its_half() {
    for (name, done) in endless(FLOODS_BESIDE.into_iter()) {
        let text = done.text();
        let elapsed: f64 =
            text.lines().last().and_then(|line| line.parse().ok()).expect("a number of seconds");
        // One instruction is one nanosecond.
        #[expect(clippy::cast_precision_loss, reason = "it has ten digits")]
        let alone = (NEIGHBOURS_LOOPS * LOOP_INSTRUCTIONS) as f64 / 1e9;
        let share = alone / elapsed;
        assert!((0.4..0.6).contains(&share), "{name}: {share:.2} of the CPU");
    }
}
