//! Event-based branches: what `docs/ebb.md` promises, in guests.
//!
//! The program `ebb-promises` checks one promise at a time. One boot of the host runs all of them in a guest, and each
//! test checks the result of its own promise. It costs 33 s of a core on the AMD host.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use guest_tests::host::{self, Host};
use guest_tests::lab::{OnEachHost, Steps};
use guest_tests::program;
use guest_tests::suite::{Test, except, on_intel, third_tier};
use guest_tests::tests;

const PROGRAM: &str = "ebb-promises";

/// A program in C that uses the header, compiled for guests and hosts.
static IN_C: LazyLock<PathBuf> = LazyLock::new(|| {
    let project = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let program = program(PROGRAM).with_file_name("ebb-in-c");
    let compiler = env::var_os("CC").unwrap_or_else(|| "cc".into());
    let status = Command::new(compiler)
        .args(["-Wall", "-Wextra", "-Werror", "-O2", "-static", "-o"])
        .arg(&program)
        .arg(project.join("tests/ebb/ebb.c"))
        .arg("-I")
        .arg(project.join("guest-images/ebb/include"))
        .status();
    assert!(status.expect("there is a C compiler").success(), "the program in C does not compile");
    program
});

/// Results of all promises in a guest, and of some in guests with two vCPUs and with the policy for tenants. On the
/// host itself nobody serves a block.
static RESULTS: OnEachHost = OnEachHost::new(|| {
    let read = |path: &Path| fs::read(path).expect("it has been built");
    let (path, example) = (program(PROGRAM), program("ebb-sample"));
    let all = "for name in $(./ebb-promises); do line=$(./ebb-promises $name 2>&1); echo $name $? $line; done; \
               ebb-sample --cost";
    let some = "for name in threads processes switches; do ./ebb-promises $name || exit; done";
    let steps = Steps::new("ebb")
        .in_guest(PROGRAM, read(&path))
        .in_guest("ebb-in-c", read(&IN_C))
        .file(example, "ebb-sample")
        .step("host", "./ebb-sample --cost")
        .step("guest", &format!("./tally run -- sh -c '{all}'"));
    match host::current() {
        Host::Intel => steps,
        Host::Amd => steps
            .step("legacy", &format!("./tally run --pmu amd-legacy -- sh -c '{all}'"))
            .step("two", &format!("./tally run --cpus 2 -- sh -c '{some}'"))
            .step("tenant", "./tally run --pmu-policy tenant -- ebb-sample")
            .step("example", "./tally run -- sh -c './ebb-in-c && ebb-sample'")
            .step("log", "./tally run --pmu-log log -- ./ebb-promises close && ./tally log --show log"),
    }
    .run()
});

/// Returns the guests in which all promises were checked.
fn guests() -> &'static [&'static str] {
    match host::current() {
        Host::Amd => &["guest", "legacy"],
        Host::Intel => &["guest"],
    }
}

/// Returns the status and the output of a promise's check.
fn verdict(place: &str, promise: &str) -> (i32, String) {
    let done = RESULTS.of(place);
    let text = done.text();
    let mut lines = text.lines().filter_map(|line| line.strip_prefix(promise)?.strip_prefix(' '));
    let verdict = lines.next().and_then(|line| line.split_once(' '));
    let (status, message) = verdict.unwrap_or_else(|| panic!("no result of {promise}: {text}{}", done.err));
    (status.parse().expect("a status is a number"), message.to_owned())
}

/// Defines a test for each promise. `every_promise_has_its_test` checks that the list is complete.
macro_rules! promises {
    ($($test:ident: $promise:literal,)*) => {
        const TESTED: &[&str] = &[$($promise),*];

        mod kept {
            pub fn tests() -> Vec<guest_tests::suite::Test> {
                guest_tests::tests![$($test),*]
            }

            $(
                fn $test() {
                    for place in super::guests() {
                        let (status, message) = super::verdict(place, $promise);
                        assert_eq!(status, 0, "{place}: {message}");
                    }
                }
            )*
        }
    };
}

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    let on_amd = tests![
        every_promise_has_its_test,
        a_program_in_c_is_branched,
        the_example_prints_its_own_flame_graph,
        with_two_vcpus_threads_and_processes_have_their_own,
        a_policy_switches_them_off,
        overflows_are_in_the_event_log,
    ];
    let once_more = third_tier([on_intel(on_both()), tests![none_of_a_million_branches_is_lost]].concat());
    [on_amd, once_more, on_both()].concat()
}

/// The tests of what also holds where interrupts are late: all but the place of a branch.
pub fn of_late_interrupts() -> Vec<Test> {
    except(kept::tests(), &["a_branch_comes_at_the_instruction_behind_the_overflow"])
}

fn on_both() -> Vec<Test> {
    let of_costs = tests![
        without_tally_the_library_says_that_nobody_serves_it,
        a_branch_costs_little_more_than_the_exit_of_an_overflow,
    ];
    [kept::tests(), of_costs].concat()
}

promises! {
    the_registers_are_the_programs_own: "registers",
    what_they_do_not_have_is_refused: "attributes",
    cycles_are_counted_to_the_last: "cycles",
    a_counter_that_is_disabled_stands_still: "stands-still",
    instructions_are_counted_to_the_last: "instructions",
    a_branch_comes_at_the_instruction_behind_the_overflow: "places",
    a_new_period_holds_from_the_next_overflow_on: "period-changes",
    several_counters_branch: "several-counters",
    a_handler_is_not_interrupted_by_another: "back-to-back",
    overflows_wait_while_they_are_disabled: "masked",
    overflows_wait_across_task_switches: "masked-across-switches",
    without_a_handler_the_counter_freezes: "no-handler",
    nothing_of_the_program_is_changed: "red-zone",
    no_branch_is_lost_in_task_switches: "switches",
    several_processes_share_a_cpu: "processes",
    each_thread_has_its_own: "threads",
    a_child_that_asked_is_branched: "child-that-asked",
    a_child_that_did_not_ask_is_not: "child-that-did-not",
    fork_does_not_hand_them_on: "fork",
    exec_ends_them: "exec",
    closing_the_event_ends_them: "close",
    they_evict_events_of_the_cpu: "evicts-cpu-event",
    they_evict_events_of_the_task: "evicts-task-event",
    they_stay_out_if_pinned_events_of_the_cpu_are_there: "pinned-cpu-event",
    they_stay_out_if_pinned_events_of_the_task_are_there: "pinned-task-event",
    an_address_of_the_kernel_is_no_handler: "invalid-handlers",
    only_threads_that_asked_are_branched_for_an_inherited_event: "inherited",
    only_threads_that_asked_are_branched_for_an_event_of_the_cpu: "for-a-cpu",
    the_kernel_may_sample_the_event_as_well: "sampled",
    the_kernel_is_not_counted: "with-the-kernel",
}

fn every_promise_has_its_test() {
    let output = Command::new(program(PROGRAM)).output().expect("the program runs here too");
    assert_eq!(String::from_utf8_lossy(&output.stdout).lines().collect::<Vec<_>>(), TESTED);
}

/// What the library says where nobody serves a block.
const NOT_OFFERED: &str = "this machine does not have them, or its operator has switched them off";

fn without_tally_the_library_says_that_nobody_serves_it() {
    let done = RESULTS.of("host");
    assert!(done.err.contains(NOT_OFFERED) && done.status != 0, "{}{}", done.text(), done.err);
}

fn a_policy_switches_them_off() {
    let done = RESULTS.of("tenant");
    assert!(done.err.contains(NOT_OFFERED) && done.status != 0, "{}{}", done.text(), done.err);
}

fn with_two_vcpus_threads_and_processes_have_their_own() {
    let done = RESULTS.of("two");
    assert_eq!((done.status, done.text().lines().count()), (0, 3), "{}{}", done.text(), done.err);
}

fn a_program_in_c_is_branched() {
    let done = RESULTS.of("example");
    assert!(done.text().starts_with("100 branches, 0 outside, whole\n"), "{}{}", done.text(), done.err);
}

fn the_example_prints_its_own_flame_graph() {
    let done = RESULTS.of("example");
    let text = done.text();
    let line = |function: &str| {
        let line = text.lines().find(|line| line.split_whitespace().nth(2) == Some(function));
        line.unwrap_or_else(|| panic!("{function}: {text}{}", done.err))
    };
    assert!(line("work").contains("100.0 % work"), "{text}");
    // A caller is above what it has called, and as wide at least.
    let part = |function| line(function).split_whitespace().next().unwrap().parse::<f64>().unwrap();
    assert!(part("primes") > 10.0 && part("collatz") >= part("steps") && part("steps") > 10.0, "{text}");
    assert!(text.find("collatz") < text.find("steps"), "{text}");
}

/// Takes seven minutes of a core.
fn none_of_a_million_branches_is_lost() {
    let path = program(PROGRAM);
    let bytes = fs::read(&path).expect("it has been built");
    let done = Steps::new("ebb::million")
        .in_guest(PROGRAM, bytes)
        .step("guest", "./tally run -- ./ebb-promises switches 1000000")
        .run();
    let done = done.of("guest");
    let taken = done.text().split(' ').next().and_then(|number| number.parse::<u64>().ok());
    assert!(done.status == 0 && taken >= Some(1_000_000), "{}{}", done.text(), done.err);
}

fn overflows_are_in_the_event_log() {
    let done = RESULTS.of("log");
    let branched =
        done.text().matches("overflow for a branch, counters 0x1: the program goes on at 0x").count();
    assert_eq!(branched, 4, "{}{}", done.text(), done.err);
}

/// In instructions of host and guest. On the AMD host, a signal of the guest's kernel costs 24,400.
fn a_branch_costs_little_more_than_the_exit_of_an_overflow() {
    let most = match host::current() {
        Host::Amd => 13_600,
        Host::Intel => 14_800,
    };
    for place in guests() {
        let text = RESULTS.of(place).text();
        let cost = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            let number = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
            number.unwrap_or_else(|| panic!("{place}: {text}"))
        };
        assert!(cost("branch ") < most && cost("branch ") < cost("signal ") * 2 / 3, "{place}: {text}");
    }
}
