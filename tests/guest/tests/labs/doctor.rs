//! `tally doctor`, on the lab's simulated host, well and unwell.

use std::sync::LazyLock;

use guest_tests::lab::{Results, StepOutput, Steps};
use guest_tests::program;
use guest_tests::suite::Test;
use guest_tests::tests;
use serde_json::Value;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    tests![
        a_host_that_is_well_is_told_of_in_a_line_a_fact,
        machines_are_told_the_same,
        who_holds_a_counter_is_told_with_the_command_that_frees_it,
        who_else_has_perf_events_is_told,
        a_host_without_kvm_is_told_what_to_do_and_where_guests_run,
        a_kvm_that_is_not_for_this_user_is_told_with_the_command_that_mends_it,
        a_perf_that_is_not_for_this_user_is_told_with_the_commands_that_mend_it,
        a_sandbox_that_forbids_perf_is_told_of,
    ]
}

static RESULTS: LazyLock<Results> = LazyLock::new(|| {
    let knob = |name: &str, value: i32| format!("echo {value} >/proc/sys/kernel/{name}");
    let (paranoid, free) = (knob("perf_event_paranoid", 3), knob("perf_event_paranoid", -1));
    Steps::new("doctor")
        .file(program("restricted"), "restricted")
        .step("well", "./tally doctor")
        .step("machines", "./tally doctor --json")
        .step("watchdog", &format!("{}; ./tally doctor; status=$?; {}; exit $status", knob("nmi_watchdog", 1), knob("nmi_watchdog", 0)))
        .step("busy", "perf stat -e instructions:u -- sleep 100 & sleep 1; ./tally doctor; status=$?; kill $!; exit $status")
        .step("no-kvm", "mv /dev/kvm kvm; ./tally doctor; status=$?; mv kvm /dev/kvm; exit $status")
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
    let done: &StepOutput = RESULTS.of(step);
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

fn a_host_that_is_well_is_told_of_in_a_line_a_fact() {
    let lines = lines("well", 0);
    for words in [
        "ok  processor   QEMU",
        "-   kernel      Linux 6.",
        "ok  kvm         /dev/kvm can be used (kvm_amd, on the processor's virtualisation), version 12 of its interface",
        "ok  capability  KVM_CAP_IRQFD is there, for interrupts of devices",
        "ok  capability  KVM_CAP_IMMEDIATE_EXIT is there, for leaving the guest when a counter overflows",
        "ok  capability  KVM_CAP_X86_USER_SPACE_MSR is there, for the PMU's registers",
        "ok  capability  KVM_CAP_X86_MSR_FILTER is there, ",
        "-   capability  KVM_CAP_COALESCED_PIO is there, ",
        "-   capability  KVM_CAP_PMU_CAPABILITY is there: ",
        "-   kvm's pmu   enable_pmu is ",
        "-   nested      kvm_amd's nested is 1: ",
        "ok  guests      Linux runs here as it is",
        "-   privilege   this process has CAP_PERFMON",
        "-   files       this process may have ",
        "-   perf        kernel.perf_event_paranoid is -1: everybody may count",
        "-   watchdog    the NMI watchdog is off",
        "-   rdpmc       programs may read their counters by RDPMC",
        "ok  pmu         guests see AMD's PMU with PerfMonV2, 6 counters",
        "ok  events      the host counts in guests cycles, instructions, cache-references, cache-misses, branches, \
         branch-misses",
        "-   guest       the default guest is that of TALLY_GUEST, in /scenario/guest",
        "-   lab         the lab is not built, which takes minutes, once: `tally lab build`",
    ] {
        assert!(lines.iter().any(|line| line.starts_with(words)), "{words}: {lines:#?}");
    }
    assert!(lines.iter().all(|line| !line.starts_with("BAD")), "{lines:#?}");
    let verdict = "ok  verdict     Linux guests with a PMU run here: `tally run -- perf stat true`";
    assert_eq!(lines.last().expect("there are lines"), verdict);
}

fn machines_are_told_the_same() {
    let facts: Vec<Value> = serde_json::from_str(&lines("machines", 0).join("\n")).expect("it is JSON");
    let people = lines("well", 0);
    assert_eq!(facts.len(), people.len());
    for (fact, line) in facts.iter().zip(people) {
        assert!(line.ends_with(fact["says"].as_str().expect("it is text")), "{line}");
    }
}

fn who_holds_a_counter_is_told_with_the_command_that_frees_it() {
    let lines = lines("watchdog", 0);
    let has = |words: &str| lines.iter().any(|line| line.contains(words));
    assert!(
        has("holds one counter of every CPU: `sudo sysctl kernel.nmi_watchdog=0` frees it"),
        "{lines:#?}"
    );
    assert!(has("guests see AMD's PMU with PerfMonV2, 5 counters"), "{lines:#?}");
}

fn who_else_has_perf_events_is_told() {
    let lines = lines("busy", 0);
    let holders: Vec<_> = lines.iter().filter(|line| line.starts_with("-   holders")).collect();
    let [holders] = &holders[..] else { panic!("{lines:#?}") };
    assert!(holders.contains("others have perf events open: perf (process "), "{holders}");
}

fn a_host_without_kvm_is_told_what_to_do_and_where_guests_run() {
    let lines = lines("no-kvm", 1);
    let has = |words: &str| lines.iter().any(|line| line.starts_with(words));
    assert!(
        has("BAD kvm         no /dev/kvm, though this kernel has KVM: make it, `sudo mknod"),
        "{lines:#?}"
    );
    let verdict = "BAD verdict     Linux guests run only in the lab: `tally lab run -- perf stat true`";
    assert_eq!(lines.last().expect("there are lines"), verdict);
}

fn a_kvm_that_is_not_for_this_user_is_told_with_the_command_that_mends_it() {
    let [(state, says, commands)] = &told("kvm", 1, "kvm")[..] else { panic!("one fact") };
    assert_eq!(state, "bad", "{says}");
    let all = ["sudo chgrp kvm /dev/kvm", "sudo chmod 660 /dev/kvm", "sudo usermod -aG kvm $USER"];
    assert_eq!(commands, &all);
    assert!(told("kvm", 1, "verdict")[0].1.starts_with("Linux guests run only in the lab"));
}

fn a_perf_that_is_not_for_this_user_is_told_with_the_commands_that_mend_it() {
    let [(state, says, commands)] = &told("perf", 1, "pmu")[..] else { panic!("one fact") };
    assert_eq!(state, "bad", "{says}");
    assert!(commands.contains(&"sudo sysctl kernel.perf_event_paranoid=1".to_owned()), "{says}");
    assert_eq!(told("perf", 1, "kvm")[0].0, "good");
    let [(_, _, setting)] = &told("perf", 1, "perf")[..] else { panic!("one fact") };
    assert_eq!(setting, &["sudo sysctl kernel.perf_event_paranoid=1"]);
    let [(_, _, right)] = &told("perf", 1, "privilege")[..] else { panic!("one fact") };
    assert_eq!(right, &["sudo setcap cap_perfmon+ep /scenario/tally"]);
    assert!(told("perf", 1, "verdict")[0].1.starts_with("Linux guests run here, but without a PMU"));
}

fn a_sandbox_that_forbids_perf_is_told_of() {
    let [(state, says, _)] = &told("sandbox", 1, "pmu")[..] else { panic!("one fact") };
    assert!(state == "bad" && says.contains("seccomp"), "{says}");
    assert_eq!(told("sandbox", 1, "sandbox").len(), 1);
    assert!(told("machines", 0, "sandbox").is_empty());
}
