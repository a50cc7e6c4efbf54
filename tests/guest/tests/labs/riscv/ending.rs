//! Tests of how guests on RISC-V hosts end, and of the exit status.

use std::sync::LazyLock;

use guest_images::payloads::riscv64::{DEBUG_EXIT, DEBUG_EXIT_NUMBER};
use guest_tests::lab::{Results, Steps};
use guest_tests::suite::{Test, second_tier};
use guest_tests::tests;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    second_tier(tests![
        power_off_and_reset_before_the_commands_end_are_errors,
        a_number_at_the_debug_exit_is_the_status,
        sigterm_ends_a_busy_guest,
        an_interrupt_reaches_the_command,
        the_second_interrupt_ends_a_guest_that_does_not_react_to_the_first,
    ])
}

static RESULTS: LazyLock<Results> = LazyLock::new(|| {
    // A shell starts background commands with SIGINT ignored, and their children inherit this. perf installs a handler
    // of its own, so the program that it starts has the default action again.
    let signalled = |what: &str, signals: &str| {
        format!(
            "perf stat -o /dev/null -e task-clock ./tally run -- sh -c '{what}' >said & perf=$!; \
             until grep -q ready said; do sleep 0.1; done; {signals}; read begun rest </proc/uptime; wait $perf; status=$?; \
             read ended rest </proc/uptime; cat said; awk \"BEGIN {{ print ($ended - $begun < 1) }}\"; exit $status"
        )
    };
    let send = |signal: &str| format!("kill -{signal} $(pidof tally)");
    Steps::on_riscv("riscv::ending")
        .configure_host(|scenario| scenario.program(DEBUG_EXIT, "debug-exit"))
        .step("power-off", "./tally run -- poweroff -f")
        .step("reset", "./tally run -- reboot -f")
        .step("debug-exit", "./tally run --pmu none --kernel debug-exit")
        .step("debug-exit-of-linux", &format!("./tally run -- devmem 0x100000 8 {DEBUG_EXIT_NUMBER}"))
        .step("terminated", &signalled("echo ready; while :; do :; done", &send("TERM")))
        .step(
            "interrupted",
            &signalled("trap \"echo caught; exit 7\" INT; echo ready; while :; do :; done", &send("INT")),
        )
        .step(
            "interrupted-twice",
            // The command freezes the guest's agent (process 1) for good, with a cgroup.
            &signalled(
                "mkdir /tmp/c; mount -t cgroup2 none /tmp/c; mkdir /tmp/c/x; echo ready; sleep 0.2; \
                 echo 1 >/tmp/c/x/cgroup.procs; echo 1 >/tmp/c/x/cgroup.freeze; while :; do :; done",
                &format!(
                    "sleep 1; {int}; sleep 0.2; pidof tally >/dev/null && echo waits; {int}",
                    int = send("INT")
                ),
            ),
        )
        .run()
});

fn power_off_and_reset_before_the_commands_end_are_errors() {
    for (step, how) in [("power-off", "switched itself off"), ("reset", "reset")] {
        let done = RESULTS.of(step);
        let expected = format!("tally: the guest {how} before its command ended\n");
        assert!(done.status == 125 && done.err.starts_with(&expected), "{}: {}", done.status, done.err);
    }
}

fn a_number_at_the_debug_exit_is_the_status() {
    for step in ["debug-exit", "debug-exit-of-linux"] {
        let done = RESULTS.of(step);
        let expected = (i32::from(DEBUG_EXIT_NUMBER << 1 | 1), "", "");
        assert_eq!((done.status, done.text().as_str(), done.err.as_str()), expected, "{step}");
    }
}

fn sigterm_ends_a_busy_guest() {
    let done = RESULTS.of("terminated");
    assert_eq!((done.status, done.text().as_str()), (128 + 15, "ready\n1\n"), "{}", done.err);
}

fn an_interrupt_reaches_the_command() {
    let done = RESULTS.of("interrupted");
    assert_eq!((done.status, done.text().as_str()), (7, "ready\ncaught\n1\n"), "{}", done.err);
}

fn the_second_interrupt_ends_a_guest_that_does_not_react_to_the_first() {
    let done = RESULTS.of("interrupted-twice");
    assert_eq!((done.status, done.text().as_str()), (128 + 2, "waits\nready\n1\n"), "{}", done.err);
}
