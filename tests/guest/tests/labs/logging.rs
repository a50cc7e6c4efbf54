//! Tests of the messages of `-v` and `RUST_LOG`, on the lab's simulated host.

use std::sync::LazyLock;

use guest_tests::lab::{Results, StepOutput, Steps};
use guest_tests::suite::Test;
use guest_tests::tests;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    tests![
        a_successful_run_prints_no_messages,
        one_v_logs_decisions_and_their_reasons,
        two_v_log_each_counter_and_three_each_register_access,
        verbosity_does_not_change_the_event_log,
        the_variable_rust_log_selects_messages,
        verbose_runs_show_the_guests_console,
    ]
}

static RESULTS: LazyLock<Results> = LazyLock::new(|| {
    let run = |options: &str| {
        format!("./tally run {options} --kernel payload --append 'count-user=0:0x4100c0,1000,0'")
    };
    let linux = |options: &str| format!("./tally run {options} -- sh -c 'exit 3'");
    Steps::new("logging")
        .step("quiet", &run(""))
        .step("v", &run("-v"))
        .step("vv", &run("-vv --pmu-log log"))
        .step("log", "./tally log --show log")
        .step("vvv", &run("-vvv"))
        .step("variable", &format!("RUST_LOG=tally::pmu=trace {}", run("")))
        .step("mistake", &format!("RUST_LOG=tally=loud {}", run("")))
        .step("linux", &linux(""))
        .step("linux-v", &linux("-v"))
        .run()
});

/// Returns Tally's messages of a run of the bare-metal test program. Checks that each has the prefix `tally: `.
fn messages(step: &str) -> Vec<&'static str> {
    let done: &StepOutput = RESULTS.of(step);
    assert_eq!(done.status, 1, "{step}: {}", done.err);
    let lines =
        done.err.lines().map(|line| line.strip_prefix("tally: ").expect("every line says whose it is"));
    lines.collect()
}

fn has(lines: &[&str], words: &str) -> bool {
    lines.iter().any(|line| line.contains(words))
}

fn a_successful_run_prints_no_messages() {
    assert_eq!(messages("quiet"), [""; 0]);
    let linux = RESULTS.of("linux");
    assert_eq!((linux.status, linux.err.as_str()), (3, ""));
}

fn one_v_logs_decisions_and_their_reasons() {
    let lines = messages("v");
    for words in [
        "guest: 512 MiB of memory at 0x0-0x1fffffff; vCPUs: 1",
        "kernel: payload, a multiboot image",
        "PMU: the guest sees AMD's PMU with PerfMonV2, 6 counters (--pmu auto, on a host with AMD's processor)",
        "vCPU 0: the guest's counters are backed by pinned perf events of this thread",
        "the guest wrote 0 to the debug exit",
    ] {
        assert!(lines.contains(&words), "{words}: {lines:#?}");
    }
    assert!(!has(&lines, "counter 0"), "{lines:#?}");
}

fn two_v_log_each_counter_and_three_each_register_access() {
    let counter = "vCPU 0: counter 0 counts rc0:u, ";
    let access = "vCPU 0: writes 0x4100c0 to 0xc0010200: done";
    let (two, three) = (messages("vv"), messages("vvv"));
    assert!(has(&two, counter) && !has(&two, access), "{two:#?}");
    assert!(has(&three, counter) && has(&three, access), "{three:#?}");
}

fn verbosity_does_not_change_the_event_log() {
    let log = RESULTS.of("log").text();
    let is_in_both = |line: &str| line.contains("PMU: ") || line.contains("RDPMC");
    // The event log has a time before each message.
    let logged =
        log.lines().filter(|line| is_in_both(line)).filter_map(|line| line.trim_start().split_once(' '));
    let printed: Vec<_> = messages("v").into_iter().filter(|line| is_in_both(line)).collect();
    assert!(printed.len() > 1 && logged.map(|(_, words)| words).eq(printed), "{log}");
    assert!(!log.contains("writes 0x4100c0") && !log.contains("kernel: payload"), "{log}");
}

fn the_variable_rust_log_selects_messages() {
    let lines = messages("variable");
    assert!(has(&lines, "vCPU 0: writes 0x4100c0 to 0xc0010200: done"), "{lines:#?}");
    assert!(!has(&lines, "guest: ") && !has(&lines, "counter 0"), "{lines:#?}");
    assert_eq!(messages("mistake"), ["RUST_LOG: error parsing logger filter: invalid logging spec 'loud'"]);
}

fn verbose_runs_show_the_guests_console() {
    let done = RESULTS.of("linux-v");
    assert_eq!((done.status, done.text().as_str()), (3, ""));
    for words in
        ["Linux version", "tally: kernel command line: ", "tally: the guest's command ended with status 3"]
    {
        assert!(done.err.contains(words), "{words}: {}", done.err);
    }
}
