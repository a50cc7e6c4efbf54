//! `tally doctor`, on the lab's simulated host, well and unwell.

use std::sync::LazyLock;

use guest_tests::lab::{Done, Results, Steps};
use guest_tests::program;
use serde_json::Value;

static RESULTS: LazyLock<Results> = LazyLock::new(|| {
    let knob = |name: &str, value: i32| format!("echo {value} >/proc/sys/kernel/{name}");
    let (paranoid, free) = (knob("perf_event_paranoid", 2), knob("perf_event_paranoid", -1));
    Steps::new()
        .file(program("restricted"), "restricted")
        .step("well", "./tally doctor")
        .step("machines", "./tally doctor --json")
        .step("watchdog", &format!("{}; ./tally doctor; status=$?; {}; exit $status", knob("nmi_watchdog", 1), knob("nmi_watchdog", 0)))
        .step("kvm", "chmod 600 /dev/kvm; ./restricted unprivileged ./tally doctor --json")
        .step(
            "perf",
            &format!(
                "chmod 666 /dev/kvm; {paranoid}; ./restricted unprivileged ./tally doctor --json; status=$?; {free}; exit $status"
            ),
        )
        .step("sandbox", "./restricted seccomp ./tally doctor --json")
        .run()
});

fn lines(step: &str, status: i32) -> Vec<String> {
    let done: &Done = RESULTS.of(step);
    assert_eq!((done.status, done.err.as_str()), (status, ""), "{}", done.text());
    done.text().lines().map(str::to_owned).collect()
}

/// The facts about this, as machines get them: their states, what they say, and the commands.
fn told(step: &str, status: i32, about: &str) -> Vec<(String, String, Vec<String>)> {
    let facts: Vec<Value> = serde_json::from_str(&lines(step, status).join("\n")).expect("it is JSON");
    let text = |value: &Value| value.as_str().expect("it is text").to_owned();
    let commands =
        |fact: &Value| fact["commands"].as_array().expect("it is a list").iter().map(text).collect();
    let about = facts.iter().filter(|fact| fact["about"] == about);
    about.map(|fact| (text(&fact["state"]), text(&fact["says"]), commands(fact))).collect()
}

#[test]
fn a_host_that_is_well_is_told_of_in_a_line_a_fact() {
    let lines = lines("well", 0);
    for words in [
        "ok  processor   QEMU",
        "ok  kvm         /dev/kvm can be used (kvm_amd), and has KVM_CAP_",
        "-   kvm's pmu   enable_pmu is ",
        "ok  guests      Linux runs here as it is",
        "-   watchdog    the NMI watchdog is off",
        "ok  pmu         guests see AMD's PMU with PerfMonV2, 6 counters",
        "ok  events      the host counts cycles, instructions, branches, branch-misses in guests, not ref-cycles",
    ] {
        assert!(lines.iter().any(|line| line.starts_with(words)), "{words}: {lines:#?}");
    }
    assert!(lines.iter().all(|line| !line.starts_with("BAD")), "{lines:#?}");
}

#[test]
fn machines_are_told_the_same() {
    let facts: Vec<Value> = serde_json::from_str(&lines("machines", 0).join("\n")).expect("it is JSON");
    let people = lines("well", 0);
    assert_eq!(facts.len(), people.len());
    for (fact, line) in facts.iter().zip(people) {
        assert!(line.ends_with(fact["says"].as_str().expect("it is text")), "{line}");
    }
}

#[test]
fn who_holds_a_counter_is_told_with_the_command_that_frees_it() {
    let lines = lines("watchdog", 0);
    let has = |words: &str| lines.iter().any(|line| line.contains(words));
    assert!(
        has("holds one counter of every CPU: `sudo sysctl kernel.nmi_watchdog=0` frees it"),
        "{lines:#?}"
    );
    assert!(has("guests see AMD's PMU with PerfMonV2, 5 counters"), "{lines:#?}");
}

#[test]
fn a_kvm_that_is_not_for_this_user_is_told_with_the_command_that_mends_it() {
    let [(state, says, commands)] = &told("kvm", 1, "kvm")[..] else { panic!("one fact") };
    assert_eq!(state, "bad", "{says}");
    assert_eq!(commands, &["sudo usermod -aG kvm $USER"]);
}

#[test]
fn a_perf_that_is_not_for_this_user_is_told_with_the_commands_that_mend_it() {
    let [(state, says, commands)] = &told("perf", 1, "pmu")[..] else { panic!("one fact") };
    assert_eq!(state, "bad", "{says}");
    assert!(commands.contains(&"sudo sysctl kernel.perf_event_paranoid=1".to_owned()), "{says}");
    assert_eq!(told("perf", 1, "kvm")[0].0, "good");
}

#[test]
fn a_sandbox_that_forbids_perf_is_told_of() {
    let [(state, says, _)] = &told("sandbox", 1, "pmu")[..] else { panic!("one fact") };
    assert!(state == "bad" && says.contains("seccomp"), "{says}");
}
