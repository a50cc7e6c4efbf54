//! Tests of a command's standard streams and signals: pipes pass every byte on, and a terminal behaves like one.

use std::sync::LazyLock;

use guest_tests::lab::{Results, StepOutput, Steps};
use guest_tests::program;
use guest_tests::suite::Test;
use guest_tests::tests;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    tests![
        piped_input_arrives_byte_for_byte_and_ends,
        a_command_in_a_pipeline_passes_on_every_byte,
        unread_input_and_background_processes_do_not_delay_the_end,
        programs_in_the_guest_share_their_input_and_write_into_pipes,
        an_interrupt_reaches_the_command,
        the_second_interrupt_ends_a_guest_that_does_not_react_to_the_first,
        signals_that_are_ignored_at_the_start_stay_ignored,
        sigterm_ends_the_vm_even_if_the_command_ignores_it,
        unwritable_output_is_an_error_in_one_line,
        the_command_has_a_terminal_that_follows_the_users_size,
        each_stream_is_a_terminal_only_if_the_users_is,
        with_piped_output_the_terminal_mode_is_unchanged,
        ctrl_a_x_ends_a_vm_with_a_command,
        perf_top_draws_and_quits,
    ]
}

const RUN: &str = "./tally run";
const BOOT: &str = "./tally run --boot";

static RESULTS: LazyLock<Results> =
    LazyLock::new(|| terminals(pipes(Steps::new("streams").from_template())).run());

/// Adds commands whose streams are pipes and files.
fn pipes(steps: Steps) -> Steps {
    let interrupted = |what: &str, signals: &str| {
        format!(
            "rm -f said; (until grep -qs ready said; do sleep 0.1; done; {signals}) & ./interruptible {RUN} -- sh -c '{what}' >said; status=$?; \
             wait; cat said; exit $status"
        )
    };
    let send = |signal: &str| format!("kill -{signal} $(pidof tally)");
    let kinds = "for fd in 0 1 2; do [ ! -p /dev/fd/$fd ] || echo pipe; done; echo x >/dev/stderr; sleep 1000 & echo done";
    let counts =
        "perf record -q -o - /lib/tally/loop | wc -c; dd bs=1 count=3 2>/dev/null | tr a-z A-Z; wc -c";
    steps
        .file(program("interruptible"), "interruptible")
        // The binary of `tally` serves as data with all byte values.
        .step("through", &format!("cat tally | {RUN} -- cat | cmp - tally"))
        .step("file", &format!("{RUN} -- sh -c 'cat >x; sha256sum <x' <tally; sha256sum <tally"))
        .step("unread", &format!("yes | {RUN} -- sh -c '{kinds}'"))
        .step("shared", &format!("(echo abcdef; yes | head -n 5000) | {RUN} -- sh -c '{counts}'"))
        .step(
            "interrupt",
            &interrupted("trap \"echo caught; exit 7\" INT; echo ready; while :; do sleep 0.1; done", &send("INT")),
        )
        .step(
            "interrupt-perf",
            &interrupted("echo ready; exec perf stat -x, -e task-clock sleep 1000", "INT"),
        )
        .step(
            "interrupt-twice",
            // The command freezes the guest's agent (process 1) for good, with a cgroup.
            &interrupted(
                "mkdir /tmp/c; mount -t cgroup2 none /tmp/c; mkdir /tmp/c/x; echo ready; sleep 1; \
                 echo 1 >/tmp/c/x/cgroup.procs; echo 1 >/tmp/c/x/cgroup.freeze; sleep 1000",
                &format!("sleep 2; {int}; sleep 0.5; pidof tally >/dev/null && echo waits >&2; {int}", int = send("INT")),
            ),
        )
        .step(
            "ignored",
            &format!(
                "rm -f said; mkfifo fifo; (trap '' HUP; exec {RUN} -- sh -c 'echo ready; read line; echo $line') >said <fifo & exec 9>fifo; \
                 until grep -qs ready said; do sleep 0.1; done; kill -HUP $!; echo done >&9; wait $!; status=$?; \
                 cat said; exit $status"
            ),
        )
        .step("terminate", &interrupted("trap \"\" TERM; echo ready; while :; do sleep 0.1; done", &send("TERM")))
        .step(
            "full",
            &format!(
                "mkdir full; mount -t tmpfs -o size=8k tmpfs full; {RUN} -- head -c 100000 /dev/zero >full/x"
            ),
        )
}

/// Adds commands on terminals. The shell that waits for the terminal's new size is none with job control: that would be
/// told only if the size changed while none of its commands was running.
fn terminals(steps: Steps) -> Steps {
    steps
        .step(
            "terminal",
            &format!(
                "./typist size:31x97 'expect:# ' 'type:tty; stty size\\r' expect:/dev/pts 'expect:31 97' 'expect:# ' \
                 'type:sh -c \"size() {{ stty size; }}; trap size WINCH; while :; do sleep 0.1; echo wait\"\"ing; done\"\\r' \
                 expect:waiting size:40x120 'expect:40 120' 'type:\\x03' 'expect:# ' \
                 'type:echo cat\"\"ting; cat\\r' expect:catting 'type:echoed\\r' 'expect:echoed\\r\\nechoed' 'type:\\x03' 'expect:# ' \
                 'type:echo $?-$TERM\\r' expect:130-xterm 'type:exit 9\\r' -- env TERM=xterm {RUN} -- sh -i"
            ),
        )
        .step(
            "terminal-and-file",
            &format!(
                "./typist 'type:typed\\r' -- sh -c '{RUN} -- sh -c \"read line; tty; echo got \\$line; tty <&1\" >file'; \
                 cat file"
            ),
        )
        .step(
            "pager",
            &format!("./typist expect:nothing -- sh -c '{RUN} -- sh -c \"cat; [ -t 0 ] || echo nothing\" | cat; stty'"),
        )
        .step("escape-early", &format!("./typist 'type:\\x01x' -- {BOOT} -- sleep 1000"))
        .step("escape", &format!("./typist expect:ready 'type:\\x01x' -- {RUN} -- sh -c 'echo ready; sleep 1000'"))
        .step(
            "top",
            &format!("./typist size:24x80 expect:Samples expect:Overhead 'type:q' -- env TERM=xterm {RUN} -- perf top"),
        )
}

fn of(name: &str) -> &'static StepOutput {
    RESULTS.of(name)
}

fn piped_input_arrives_byte_for_byte_and_ends() {
    let text = of("file").text();
    let sums: Vec<&str> = text.lines().collect();
    assert!(sums.len() == 2 && sums[0] == sums[1], "{text}{}", of("file").err);
}

fn a_command_in_a_pipeline_passes_on_every_byte() {
    let done = of("through");
    assert_eq!((done.status, done.err.as_str()), (0, ""), "{}", done.text());
}

fn unread_input_and_background_processes_do_not_delay_the_end() {
    let done = of("unread");
    assert_eq!(
        (done.status, done.text().as_str(), done.err.as_str()),
        (0, "pipe\npipe\npipe\ndone\n", "x\n")
    );
}

fn programs_in_the_guest_share_their_input_and_write_into_pipes() {
    let text = of("shared").text();
    let lines: Vec<&str> = text.lines().collect();
    let bytes: u64 = lines[0].parse().expect("a number");
    assert!(bytes > 1_000, "perf writes its data into a pipe: {text}{}", of("shared").err);
    assert_eq!(lines[1..], ["ABC10004"], "{}", of("shared").err);
}

fn an_interrupt_reaches_the_command() {
    let done = of("interrupt");
    assert_eq!((done.status, done.text().as_str()), (7, "ready\ncaught\n"), "{}", done.err);
    let done = of("interrupt-perf");
    assert!(done.err.contains(",msec,task-clock"), "perf stat says what it has counted: {}", done.err);
}

fn the_second_interrupt_ends_a_guest_that_does_not_react_to_the_first() {
    let done = of("interrupt-twice");
    assert_eq!((done.status, done.err.as_str()), (128 + 2, "waits\n"));
}

fn signals_that_are_ignored_at_the_start_stay_ignored() {
    assert_eq!((of("ignored").status, of("ignored").text().as_str()), (0, "ready\ndone\n"));
}

fn sigterm_ends_the_vm_even_if_the_command_ignores_it() {
    assert_eq!(of("terminate").status, 128 + 15, "{}", of("terminate").err);
}

fn unwritable_output_is_an_error_in_one_line() {
    let done = of("full");
    assert_eq!(done.status, 125);
    assert_eq!(
        done.err,
        "tally: the command's output cannot be written: No space left on device (os error 28)\n"
    );
}

fn the_command_has_a_terminal_that_follows_the_users_size() {
    assert_eq!(of("terminal").status, 9, "{}{}", of("terminal").text(), of("terminal").err);
}

fn each_stream_is_a_terminal_only_if_the_users_is() {
    let done = of("terminal-and-file");
    assert!(done.text().ends_with("/dev/pts/0\ngot typed\nnot a tty\n"), "{}{}", done.text(), done.err);
}

fn with_piped_output_the_terminal_mode_is_unchanged() {
    let done = of("pager");
    assert!(done.status == 0 && done.text().contains("nothing"), "{}{}", done.text(), done.err);
    assert!(!done.text().contains("-icanon"), "the terminal is as it was: {}", done.text());
}

fn ctrl_a_x_ends_a_vm_with_a_command() {
    let early = of("escape-early");
    assert_eq!(early.status, 130, "before the command runs, too: {}{}", early.text(), early.err);
    assert_eq!(of("escape").status, 130, "{}{}", of("escape").text(), of("escape").err);
}

fn perf_top_draws_and_quits() {
    assert_eq!(of("top").status, 0, "{}{}", of("top").text(), of("top").err);
}
