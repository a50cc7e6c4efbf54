//! A command's streams, as its user has them: pipes that carry every byte, a terminal that is one, signals.

use std::sync::LazyLock;

use guest_tests::lab::{Done, Results, Steps};

/// The kernel's self-tests of its ciphers take half of its boot.
const RUN: &str = "./tally run --append cryptomgr.notests";

static STREAMS: LazyLock<Results> = LazyLock::new(|| {
    // The begin of the tally program itself: bytes of every kind.
    let input = "head -c 300000 tally";
    let interrupted = |what: &str, signal: &str| {
        format!(
            "{RUN} -- sh -c '{what}' >said & until grep -q ready said; do sleep 0.1; done; kill -{signal} $!; wait $!; \
             status=$?; cat said; exit $status"
        )
    };
    Steps::new()
        .step("input", &format!("{input} | {RUN} -- sh -c 'cat >/tmp/x; sha256sum </tmp/x; wc -c </tmp/x'"))
        .step("same", &format!("{input} | sh -c 'cat >/tmp/x; sha256sum </tmp/x; wc -c </tmp/x'"))
        .step("file", &format!("{RUN} -- wc -c <payload; wc -c <payload"))
        .step("through", &format!("{input} | {RUN} -- cat | cmp - tally; {input} | cmp - tally"))
        .step("unread", &format!("yes | {RUN} -- echo done"))
        .step("kinds", &format!("echo | {RUN} -- sh -c 'for fd in 0 1 2; do [ -p /dev/fd/$fd ] && echo pipe; done; echo x >/dev/stderr'"))
        .step("perfs-pipe", &format!("{RUN} -- sh -c 'perf record -q -o - ./loop' | wc -c"))
        .step("interrupt", &interrupted("trap \"echo caught; exit 7\" INT; echo ready; while :; do sleep 0.1; done", "INT"))
        .step("interrupt-perf", &interrupted("echo ready; exec perf stat -x, -e task-clock sleep 1000", "INT"))
        .step("interrupt-twice", &format!(
            "{RUN} -- sh -c 'echo ready; kill -STOP $$' >said & until grep -q ready said; do sleep 0.1; done; sleep 1; \
             kill -INT $!; sleep 0.2; kill -INT $!; wait $!"
        ))
        .step("terminate", &interrupted("trap \"\" TERM; echo ready; while :; do sleep 0.1; done", "TERM"))
        .step("full", &format!("mkdir full; mount -t tmpfs -o size=8k tmpfs full; {RUN} -- head -c 100000 /dev/zero >full/x"))
        .step("background", &format!("{RUN} -- sh -c 'sleep 1000 & echo done'"))
        .step(
            "terminal",
            &format!(
                "./typist size:31x97 'expect:# ' 'type:tty; stty size\\r' expect:/dev/pts 'expect:31 97' 'expect:# ' \
                 'type:trap \"stty size\" WINCH; echo re\"\"ady\\r' expect:ready size:40x120 'type:\\r' 'expect:40 120' \
                 'type:cat\\r' 'type:echoed\\r' 'expect:echoed\\r\\nechoed' 'type:\\x03' 'expect:# ' \
                 'type:echo $?-$TERM\\r' expect:130- 'type:exit 9\\r' -- env TERM=xterm {RUN} -- sh -i"
            ),
        )
        .step(
            "terminal-and-file",
            &format!("./typist 'type:typed\\r' -- sh -c '{RUN} -- sh -c \"read line; tty; echo got \\$line; tty <&1\" >file'; cat file"),
        )
        .step(
            "pager",
            &format!("./typist expect:nothing -- sh -c '{RUN} -- sh -c \"cat; [ -t 0 ] || echo nothing\" | cat; stty'"),
        )
        .step("escape", &format!("./typist expect:ready 'type:\\x01x' -- {RUN} -- sh -c 'echo ready; sleep 1000'"))
        .step(
            "top",
            &format!(
                "./typist size:24x80 expect:Samples expect:Overhead 'type:q' -- env TERM=xterm {RUN} -- perf top"
            ),
        )
        .run()
});

fn of(name: &str) -> &'static Done {
    STREAMS.of(name)
}

#[test]
fn what_is_piped_in_arrives_byte_for_byte_and_ends() {
    assert_eq!((of("input").status, of("input").text()), (0, of("same").text()), "{}", of("input").err);
    let text = of("file").text();
    let lengths: Vec<&str> = text.lines().collect();
    assert!(lengths.len() == 2 && lengths[0] == lengths[1], "{text}{}", of("file").err);
}

#[test]
fn a_command_in_a_pipeline_passes_every_byte_on() {
    let expected = "cmp: EOF on -\n";
    assert_eq!(of("through").err.matches(expected.trim()).count(), 2, "{}", of("through").err);
}

#[test]
fn input_that_nobody_reads_holds_nothing_up() {
    assert_eq!((of("unread").status, of("unread").text().as_str()), (0, "done\n"), "{}", of("unread").err);
}

#[test]
fn a_pipe_is_a_pipe_in_the_guest() {
    assert_eq!((of("kinds").text().as_str(), of("kinds").err.as_str()), ("pipe\npipe\npipe\n", "x\n"));
    let bytes: u64 = of("perfs-pipe").text().trim().parse().expect("a number");
    assert!(bytes > 10_000, "perf writes its data into a pipe: {bytes} bytes, {}", of("perfs-pipe").err);
}

#[test]
fn an_interrupt_reaches_the_command() {
    let done = of("interrupt");
    assert_eq!((done.status, done.text().as_str()), (7, "ready\ncaught\n"), "{}", done.err);
    let done = of("interrupt-perf");
    assert!(done.err.contains(",msec,task-clock"), "perf stat says what it has counted: {}", done.err);
}

#[test]
fn a_command_that_does_not_take_an_interrupt_ends_with_the_next() {
    assert_eq!(of("interrupt-twice").status, 128 + 2, "{}", of("interrupt-twice").err);
}

#[test]
fn sigterm_ends_the_machine_whatever_the_command_thinks_of_it() {
    assert_eq!(of("terminate").status, 128 + 15, "{}", of("terminate").err);
}

#[test]
fn output_that_cannot_be_written_is_an_error_in_one_line() {
    let done = of("full");
    assert_eq!(done.status, 125);
    assert_eq!(
        done.err,
        "tally: the command's output cannot be written: No space left on device (os error 28)\n"
    );
}

#[test]
fn what_a_command_leaves_behind_is_not_waited_for() {
    assert_eq!((of("background").status, of("background").text().as_str()), (0, "done\n"));
}

#[test]
fn a_terminal_is_a_terminal_and_its_size_follows() {
    assert_eq!(of("terminal").status, 9, "{}{}", of("terminal").text(), of("terminal").err);
}

#[test]
fn each_stream_is_a_terminal_or_not_by_itself() {
    let done = of("terminal-and-file");
    assert!(done.text().ends_with("/dev/pts/0\ngot typed\nnot a tty\n"), "{}{}", done.text(), done.err);
}

#[test]
fn the_keyboard_is_left_to_who_reads_the_output() {
    let done = of("pager");
    assert!(done.status == 0 && done.text().contains("nothing"), "{}{}", done.text(), done.err);
    assert!(!done.text().contains("-icanon"), "the terminal is as it was: {}", done.text());
}

#[test]
fn ctrl_a_x_ends_a_machine_with_a_command_too() {
    assert_eq!(of("escape").status, 0, "{}{}", of("escape").text(), of("escape").err);
}

#[test]
fn perf_top_draws_and_quits() {
    assert_eq!(of("top").status, 0, "{}{}", of("top").text(), of("top").err);
}
