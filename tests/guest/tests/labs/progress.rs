//! Tests of the lab's progress messages: on a terminal one line that is erased, in a pipe nothing.

use std::process::Command;
use std::time::Duration;

use guest_tests::lab::core;
use guest_tests::suite::Test;
use guest_tests::terminal::Session;
use guest_tests::tests;
use guest_tests::{program, stderr, stdout, temporary};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    tests![
        a_terminal_shows_progress_until_the_first_output,
        a_pipe_gets_only_the_commands_output,
        output_is_passed_on_while_the_script_runs,
        progress_is_erased_after_a_script_without_output,
    ]
}

const TIMEOUT: Duration = Duration::from_mins(5);
const BOOTING: &str = "tally-lab: booting the simulated host ... ";
const ERASE: &str = "\r\x1b[K";

/// Returns a command that runs a shell script in a guest on the simulated host.
fn lab_run(script: &str) -> Command {
    let mut command = Command::new(program("tally"));
    command.args(["lab", "run", "--boot", "--", "sh", "-c", script]);
    command
}

/// Returns a command that runs a script on the simulated host.
fn exec(script: &tempfile::NamedTempFile) -> Command {
    let mut command = Command::new(program("tally-lab"));
    command.arg("exec").arg(script.path());
    command
}

fn a_terminal_shows_progress_until_the_first_output() {
    let _core = core();
    let mut session = Session::start(lab_run("echo first; exit 3")).expect("it starts");
    session.expect(BOOTING, TIMEOUT).unwrap();
    session.expect("first", TIMEOUT).unwrap();
    assert_eq!(session.wait(TIMEOUT).expect("it ends").code(), Some(3));
    let seen = session.seen();
    let (before, after) = seen.split_once("first").expect("it was seen");
    assert!(before.ends_with(ERASE), "{seen:?}");
    assert_eq!(after, "\r\n", "nothing of it comes back");
    for line in before.split(ERASE).filter(|line| !line.is_empty()) {
        assert!(line.starts_with("tally-lab: ") && !line.contains('\n'), "{line:?}");
    }
}

fn a_pipe_gets_only_the_commands_output() {
    let _core = core();
    let output = lab_run("echo out; echo err >&2; exit 3").output().expect("it runs");
    assert_eq!((stdout(&output).as_str(), stderr(&output).as_str()), ("out\n", "err\n"));
    assert_eq!(output.status.code(), Some(3));
}

fn output_is_passed_on_while_the_script_runs() {
    let _core = core();
    let script = temporary(b"echo out; while :; do :; done");
    let mut session = Session::start(exec(&script)).expect("it starts");
    session.expect("out\r\n", TIMEOUT).unwrap();
}

fn progress_is_erased_after_a_script_without_output() {
    let _core = core();
    let script = temporary(b"exit 4");
    let mut session = Session::start(exec(&script)).expect("it starts");
    assert_eq!(session.wait(TIMEOUT).expect("it ends").code(), Some(4));
    let seen = session.seen();
    assert!(seen.contains(BOOTING) && seen.ends_with(ERASE) && !seen.contains('\n'), "{seen:?}");
}
