//! Tests of `tally doctor` on the lab's simulated host, in working order and with different defects.

use guest_tests::host::{self, Host};
use guest_tests::lab::{OnEachHost, StepOutput, Steps};
use guest_tests::program;
use guest_tests::suite::{Test, on_intel, second_tier};
use guest_tests::tests;
use serde_json::Value;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    let on_any_host = tests![
        a_working_host_is_reported_with_one_line_per_fact,
        json_has_the_same_facts,
        the_watchdogs_counter_is_reported_with_the_command_that_frees_it,
    ];
    let of_any_processor = tests![
        other_processes_with_perf_events_are_reported,
        a_missing_dev_kvm_is_reported_with_a_fix_and_an_alternative,
        missing_permission_for_kvm_is_reported_with_a_fix,
        missing_permission_for_perf_is_reported_with_fixes,
        a_seccomp_filter_that_forbids_perf_is_reported,
    ];
    [on_any_host.clone(), of_any_processor, second_tier(on_intel(on_any_host))].concat()
}

static RESULTS: OnEachHost = OnEachHost::new(|| {
    let knob = |name: &str, value: i32| format!("echo {value} >/proc/sys/kernel/{name}");
    let steps =
        Steps::new("doctor").step("well", "./tally doctor").step("machines", "./tally doctor --json").step(
            "watchdog",
            &format!(
                "{}; ./tally doctor; status=$?; {}; exit $status",
                knob("nmi_watchdog", 1),
                knob("nmi_watchdog", 0)
            ),
        );
    if host::current() == Host::Intel {
        return steps.run();
    }
    steps
        .file(program("restricted"), "restricted")
        .step("busy", "perf stat -e instructions:u -- sleep 100 & sleep 1; ./tally doctor; status=$?; kill $!; exit $status")
        .step("no-kvm", "mv /dev/kvm kvm; ./tally doctor; status=$?; mv kvm /dev/kvm; exit $status")
        .step("kvm", "chmod 600 /dev/kvm; ./restricted unprivileged ./tally doctor --json")
        .step("perf", "chmod 666 /dev/kvm; ./restricted unprivileged ./tally doctor --json")
        .step("sandbox", "./restricted seccomp ./tally doctor --json")
        .run()
});

/// Returns the lines that `tally doctor` printed. Checks its status.
fn lines(step: &str, status: i32) -> Vec<String> {
    let done: &StepOutput = RESULTS.of(step);
    assert_eq!((done.status, done.err.as_str()), (status, ""), "{}", done.text());
    done.text().lines().map(str::to_owned).collect()
}

/// Returns the facts about a topic from the JSON output: state, text, and commands that fix it.
fn facts(step: &str, status: i32, about: &str) -> Vec<(String, String, Vec<String>)> {
    let facts: Vec<Value> = serde_json::from_str(&lines(step, status).join("\n")).expect("it is JSON");
    let text = |value: &Value| value.as_str().expect("it is text").to_owned();
    let commands =
        |fact: &Value| fact["commands"].as_array().expect("it is a list").iter().map(text).collect();
    let about = facts.iter().filter(|fact| fact["about"] == about);
    about.map(|fact| (text(&fact["state"]), text(&fact["says"]), commands(fact))).collect()
}

/// What is reported of one host only.
const OF_AMDS: &[&str] = &[
    "ok  processor   QEMU",
    "ok  kvm         /dev/kvm can be used (kvm_amd, on the processor's virtualisation), version 12 of its interface",
    "-   nested      kvm_amd's nested is 1: ",
    "ok  pmu         guests see AMD's PMU with PerfMonV2, 6 counters",
];
const OF_INTELS: &[&str] = &[
    "ok  processor   Intel(R) Core(TM) ",
    "ok  kvm         /dev/kvm can be used (kvm_intel, on the processor's virtualisation), version 12 of its interface",
    "ok  capability  KVM_CAP_SET_TSS_ADDR is there, for real mode on Intel's processors",
    "-   nested      kvm_intel's nested is Y: ",
    "ok  pmu         guests see Intel's PMU, version 5, 8 general and 3 fixed counters, absent events 0x0",
    "ok  events      the host counts in guests cycles, instructions, cache-references, cache-misses, branches, \
     branch-misses, bus-cycles, ref-cycles;",
];

fn a_working_host_is_reported_with_one_line_per_fact() {
    let lines = lines("well", 0);
    let of_the_host = match host::current() {
        Host::Amd => OF_AMDS,
        Host::Intel => OF_INTELS,
    };
    let of_both = [
        "-   kernel      Linux 6.",
        "ok  capability  KVM_CAP_IRQFD is there, for interrupts of devices",
        "ok  capability  KVM_CAP_IMMEDIATE_EXIT is there, for leaving the guest when a counter overflows",
        "ok  capability  KVM_CAP_X86_USER_SPACE_MSR is there, for the PMU's registers",
        "ok  capability  KVM_CAP_X86_MSR_FILTER is there, ",
        "-   capability  KVM_CAP_COALESCED_PIO is there, ",
        "-   capability  KVM_CAP_PMU_CAPABILITY is there: ",
        "-   kvm's pmu   enable_pmu is ",
        "ok  guests      Linux runs here as it is",
        "-   files       this process may have ",
        "-   pages       the counters of 362 vCPUs of a VM can be read without a system call",
        "-   perf        kernel.perf_event_paranoid is 3: only those with CAP_SYS_ADMIN may count in a guest's kernel, and \
         this process has it",
        "-   watchdog    the NMI watchdog is off",
        "-   rdpmc       programs may read their counters by RDPMC",
        "ok  events      the host counts in guests cycles, instructions, cache-references, cache-misses, branches, \
         branch-misses",
        "-   guest       the default guest is that of TALLY_GUEST, in /scenario/guest",
        "-   lab         the lab is not built, which takes minutes, once: `tally lab build`",
    ];
    for words in of_both.iter().chain(of_the_host) {
        assert!(lines.iter().any(|line| line.starts_with(words)), "{words}: {lines:#?}");
    }
    assert!(lines.iter().all(|line| !line.starts_with("BAD")), "{lines:#?}");
    let verdict = "ok  verdict     Linux guests with a PMU run here: `tally run -- perf stat true`";
    assert_eq!(lines.last().expect("there are lines"), verdict);
}

fn json_has_the_same_facts() {
    let facts: Vec<Value> = serde_json::from_str(&lines("machines", 0).join("\n")).expect("it is JSON");
    let people = lines("well", 0);
    assert_eq!(facts.len(), people.len());
    for (fact, line) in facts.iter().zip(people) {
        assert!(line.ends_with(fact["says"].as_str().expect("it is text")), "{line}");
    }
}

fn the_watchdogs_counter_is_reported_with_the_command_that_frees_it() {
    let lines = lines("watchdog", 0);
    let has = |words: &str| lines.iter().any(|line| line.contains(words));
    assert!(
        has("holds one counter of every CPU: `sudo sysctl kernel.nmi_watchdog=0` frees it"),
        "{lines:#?}"
    );
    let pmu = match host::current() {
        Host::Amd => "guests see AMD's PMU with PerfMonV2, 5 counters",
        Host::Intel => "guests see Intel's PMU, version 5, 7 general and 3 fixed counters",
    };
    assert!(has(pmu), "{lines:#?}");
}

fn other_processes_with_perf_events_are_reported() {
    let lines = lines("busy", 0);
    let holders: Vec<_> = lines.iter().filter(|line| line.starts_with("-   holders")).collect();
    let [holders] = &holders[..] else { panic!("{lines:#?}") };
    assert!(holders.contains("others have perf events open: perf (process "), "{holders}");
}

fn a_missing_dev_kvm_is_reported_with_a_fix_and_an_alternative() {
    let lines = lines("no-kvm", 1);
    let has = |words: &str| lines.iter().any(|line| line.starts_with(words));
    assert!(
        has("BAD kvm         no /dev/kvm, though this kernel has KVM: make it, `sudo mknod"),
        "{lines:#?}"
    );
    let verdict = "BAD verdict     Linux guests run only in the lab: `tally lab run -- perf stat true`";
    assert_eq!(lines.last().expect("there are lines"), verdict);
}

fn missing_permission_for_kvm_is_reported_with_a_fix() {
    let [(state, says, commands)] = &facts("kvm", 1, "kvm")[..] else { panic!("one fact") };
    assert_eq!(state, "bad", "{says}");
    let all = ["sudo chgrp kvm /dev/kvm", "sudo chmod 660 /dev/kvm", "sudo usermod -aG kvm $USER"];
    assert_eq!(commands, &all);
    assert!(facts("kvm", 1, "verdict")[0].1.starts_with("Linux guests run only in the lab"));
}

fn missing_permission_for_perf_is_reported_with_fixes() {
    let [(state, says, commands)] = &facts("perf", 1, "pmu")[..] else { panic!("one fact") };
    assert_eq!(state, "bad", "{says}");
    assert_eq!(commands, &["sudo sysctl kernel.perf_event_paranoid=1"], "{says}");
    assert_eq!(facts("perf", 1, "kvm")[0].0, "good");
    let [(_, _, setting)] = &facts("perf", 1, "perf")[..] else { panic!("one fact") };
    assert_eq!(setting, &["sudo sysctl kernel.perf_event_paranoid=1"]);
    assert!(facts("perf", 1, "verdict")[0].1.starts_with("Linux guests run here, but without a PMU"));
}

fn a_seccomp_filter_that_forbids_perf_is_reported() {
    let [(state, says, _)] = &facts("sandbox", 1, "pmu")[..] else { panic!("one fact") };
    assert!(state == "bad" && says.contains("seccomp"), "{says}");
    assert_eq!(facts("sandbox", 1, "sandbox").len(), 1);
    assert!(facts("machines", 0, "sandbox").is_empty());
}
