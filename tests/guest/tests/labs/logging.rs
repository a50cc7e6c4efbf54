//! What Tally tells of its work, on the lab's simulated host.

use std::sync::LazyLock;

use guest_tests::lab::{Results, StepOutput, Steps};
use guest_tests::suite::Test;
use guest_tests::tests;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    tests![
        nothing_is_told_of_a_run_that_goes_well,
        one_v_tells_what_is_done_and_why,
        two_tell_of_each_counter_and_three_of_each_access,
        the_log_of_the_counters_is_terse_however_much_is_told,
        a_variable_says_what_is_told,
        the_guests_console_is_shown_beside_it,
    ]
}

static RESULTS: LazyLock<Results> = LazyLock::new(|| {
    let run = |options: &str| {
        format!("./tally run {options} --kernel payload --append 'count-user=0:0x4100c0,1000,0'")
    };
    let linux = |options: &str| format!("./tally run {options} --append cryptomgr.notests -- sh -c 'exit 3'");
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

/// What a run of our bare-metal program said, of which every line is Tally's.
fn told(step: &str) -> Vec<&'static str> {
    let done: &StepOutput = RESULTS.of(step);
    assert_eq!(done.status, 1, "{step}: {}", done.err);
    let lines =
        done.err.lines().map(|line| line.strip_prefix("tally: ").expect("every line says whose it is"));
    lines.collect()
}

fn has(lines: &[&str], words: &str) -> bool {
    lines.iter().any(|line| line.contains(words))
}

fn nothing_is_told_of_a_run_that_goes_well() {
    assert_eq!(told("quiet"), [""; 0]);
    let linux = RESULTS.of("linux");
    assert_eq!((linux.status, linux.err.as_str()), (3, ""));
}

fn one_v_tells_what_is_done_and_why() {
    let lines = told("v");
    for words in [
        "guest: 512 MiB of memory at 0x0-0x1fffffff; vCPUs: 1",
        "kernel: payload, a multiboot image",
        "PMU: the guest sees AMD's PMU with PerfMonV2, 6 counters (--pmu auto, on a host with AMD's processor)",
        "vCPU 0: what its counters count is counted by pinned perf events of this thread",
        "the guest wrote 0 to the debug exit",
    ] {
        assert!(lines.contains(&words), "{words}: {lines:#?}");
    }
    assert!(!has(&lines, "counter 0"), "{lines:#?}");
}

fn two_tell_of_each_counter_and_three_of_each_access() {
    let counter = "vCPU 0: counter 0 counts rc0:u, ";
    let access = "vCPU 0: writes 0x4100c0 to 0xc0010200: done";
    let (two, three) = (told("vv"), told("vvv"));
    assert!(has(&two, counter) && !has(&two, access), "{two:#?}");
    assert!(has(&three, counter) && has(&three, access), "{three:#?}");
}

fn the_log_of_the_counters_is_terse_however_much_is_told() {
    let log = RESULTS.of("log").text();
    let said = |line: &str| line.contains("PMU: ") || line.contains("RDPMC");
    // A time is in front of each.
    let logged = log.lines().filter(|line| said(line)).filter_map(|line| line.trim_start().split_once(' '));
    let told: Vec<_> = told("v").into_iter().filter(|line| said(line)).collect();
    assert!(told.len() > 1 && logged.map(|(_, words)| words).eq(told), "{log}");
    assert!(!log.contains("writes 0x4100c0") && !log.contains("kernel: payload"), "{log}");
}

fn a_variable_says_what_is_told() {
    let lines = told("variable");
    assert!(has(&lines, "vCPU 0: writes 0x4100c0 to 0xc0010200: done"), "{lines:#?}");
    assert!(!has(&lines, "guest: ") && !has(&lines, "counter 0"), "{lines:#?}");
    assert_eq!(told("mistake"), ["RUST_LOG: error parsing logger filter: invalid logging spec 'loud'"]);
}

fn the_guests_console_is_shown_beside_it() {
    let done = RESULTS.of("linux-v");
    assert_eq!((done.status, done.text().as_str()), (3, ""));
    for words in
        ["Linux version", "tally: kernel command line: ", "tally: the guest's command ended with status 3"]
    {
        assert!(done.err.contains(words), "{words}: {}", done.err);
    }
}
