//! What Tally promises, on hosts with other kernels than the default one: Debian 12's, and the newest. What an ordinary
//! user sees there is in `stock`. A host takes a minute of a core.

use std::sync::LazyLock;

use guest_images::Suite;
use guest_images::payloads::LOOP_INSTRUCTIONS;
use guest_tests::lab::{Results, SAVED_GUESTS, Steps};
use guest_tests::suite::{Test, second_tier};
use guest_tests::{program, tests};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    second_tier(tests![
        every_pmu_passes_tallys_own_check,
        a_guests_work_is_attributed_to_it,
        a_counter_without_hardware_is_reported,
        programs_read_counters_where_the_hosts_kvm_lets_them,
        a_snapshot_loses_no_count,
        doctor_and_a_run_say_whether_kvm_can_hand_its_pmu_through,
    ])
}

static DEBIAN_12: LazyLock<Results> = LazyLock::new(|| on(Suite::Bookworm, "hosts::bookworm"));
static NEWEST: LazyLock<Results> = LazyLock::new(|| on(Suite::Sid, "hosts::sid"));

/// Returns the results on each host, with its name.
fn hosts() -> [(&'static str, &'static Results); 2] {
    [("bookworm", &DEBIAN_12), ("sid", &NEWEST)]
}

/// Options of `tally check` for each PMU.
const PMUS: [(&str, &str); 4] = [
    ("amd", ""),
    ("amd-legacy", "--pmu amd-legacy --counters 4"),
    ("intel", "--pmu intel"),
    ("intel-v2", "--pmu intel-v2 --counters 3"),
];

/// Rounds of two instructions that guests execute, whose work is compared.
const ROUNDS: [u64; 2] = [1_000_000, 3_000_000];

fn on(suite: Suite, name: &'static str) -> Results {
    let steps = Steps::new(name)
        .long()
        .configure_host(move |scenario| {
            scenario
                .host(suite)
                .file(program("counter-thief"), "counter-thief")
                .file(program("reader"), "reader")
        })
        .in_guest("reader", std::fs::read(program("reader")).expect("it was built"));
    let steps = PMUS.iter().fold(steps, |steps, (pmu, options)| {
        steps.step(&format!("check-{pmu}"), &format!("./tally check {options}"))
    });
    let steps = ROUNDS.iter().fold(steps, |steps, rounds| {
        let guest = format!("./tally run --kernel payload --append 'count-user=0:0x4100c0,{rounds},0'");
        // The status is the guest's.
        let count = format!(
            "perf stat -x, -o counted -e instructions:Gu {guest} >/dev/null; grep -o '^[0-9]*,' counted"
        );
        steps.step(&format!("attributed-{rounds}"), &count)
    });
    let starved = "./tally run --kernel payload --append 'count-user=0:0x4100c0,150000000,0' & tally=$!; sleep 0.1; \
                   ./counter-thief 6 --for 0.06 >/dev/null; wait $tally";
    let saved = "echo ready; sleep 1; perf stat -x, -e instructions:u /lib/tally/loop 2>&1; sleep 1; \
                 perf stat -x, -e instructions:u /lib/tally/loop 2>&1";
    steps
        .step("starved", starved)
        .step("reader-host", "./reader")
        .step(
            "reader",
            "./tally run --cpus 2 -- sh -c 'cat /sys/bus/event_source/devices/cpu/rdpmc >&2; ./reader'",
        )
        .step("snapshot", &format!("{SAVED_GUESTS} chain saved 1 0 -- sh -c '{saved}'"))
        .step("doctor", "./tally doctor")
        .step("run-v", "./tally run -v --kernel payload --append exit=0")
        .run()
}

fn every_pmu_passes_tallys_own_check() {
    for (host, results) in hosts() {
        for (pmu, _) in PMUS {
            let done = results.of(&format!("check-{pmu}"));
            let text = done.text();
            assert_eq!((done.status, done.err.as_str()), (0, ""), "{host}, {pmu}: {text}");
            let compared: Vec<&str> =
                text.lines().filter(|line| line.starts_with("  ") && line.contains(" of ")).collect();
            assert!(compared.len() > 8, "{host}, {pmu}: {text}");
            assert!(compared.iter().all(|line| line.ends_with("exact")), "{host}, {pmu}: {text}");
        }
    }
}

fn a_guests_work_is_attributed_to_it() {
    for (host, results) in hosts() {
        let counted = ROUNDS.map(|rounds| {
            let done = results.of(&format!("attributed-{rounds}"));
            done.text()
                .trim()
                .trim_end_matches(',')
                .parse::<u64>()
                .unwrap_or_else(|_| panic!("{host}: {}", done.text()))
        });
        assert_eq!(counted[1] - counted[0], 2 * (ROUNDS[1] - ROUNDS[0]), "{host}: {counted:?}");
    }
}

fn a_counter_without_hardware_is_reported() {
    for (host, results) in hosts() {
        let done = results.of("starved");
        let lines: Vec<&str> = done.err.lines().collect();
        let [starved, counts] = lines[..] else { panic!("{host}: {lines:?}") };
        assert!(
            starved.contains("counter 0 (rc0:u) is starved: the host has no hardware for it"),
            "{host}: {starved}"
        );
        assert!(counts.contains("counter 0 (rc0:u) counts again, after up to"), "{host}: {counts}");
        let counted =
            done.text().trim().rsplit(' ').next().and_then(|count| u64::from_str_radix(count, 16).ok());
        assert!(counted.is_some_and(|count| count < 300_000_001), "{host}: {}", done.text());
    }
}

fn programs_read_counters_where_the_hosts_kvm_lets_them() {
    let done = NEWEST.of("reader");
    assert_eq!((done.status, done.err.as_str()), (0, "1\n"), "{}", done.text());
    assert_eq!(done.text(), NEWEST.of("reader-host").text());
    assert!(done.text().contains("1000000 rounds: 2000004 instructions"), "{}", done.text());
    // On AMD's processors, the KVM of Linux 6.1 would let the instruction read 0.
    assert_eq!(DEBIAN_12.of("reader").err.lines().next(), Some("0"));
}

fn a_snapshot_loses_no_count() {
    for (host, results) in hosts() {
        let done = results.of("snapshot");
        let text = done.text();
        let counted = text.lines().filter(|line| line.starts_with(&format!("{LOOP_INSTRUCTIONS},"))).count();
        assert_eq!((done.status, counted), (0, 2), "{host}: {text}{}", done.err);
    }
}

fn doctor_and_a_run_say_whether_kvm_can_hand_its_pmu_through() {
    const MEDIATED: &str = "kvm_amd's enable_mediated_pmu is N";
    for (results, is_there) in [(&NEWEST, true), (&DEBIAN_12, false)] {
        let (doctor, run) = (results.of("doctor").text(), &results.of("run-v").err);
        assert_eq!(doctor.contains(MEDIATED), is_there, "{doctor}");
        assert!(run.contains("on a host with AMD's processor"), "{run}");
        assert_eq!(run.contains(&format!("where {MEDIATED})")), is_there, "{run}");
    }
}
