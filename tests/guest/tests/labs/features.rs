//! What Linux promises of its performance counters, kept in a guest, and on the simulated host that the guest counts with: one
//! of each architecture.
//!
//! The program `perf-features` checks one promise at a time, to the last instruction. It runs all of them in each place,
//! in one boot of each host; each test looks at what it said of its own, in guests of all models.

use std::fs;
use std::process::Command;
use std::sync::LazyLock;

use guest_images::Progress;
use guest_tests::lab::{Results, Steps};
use guest_tests::model::{Model, selected_models};
use guest_tests::program;
use guest_tests::suite::{Test, second_tier};
use guest_tests::tests;
use tally_lab::{HostPmu, cross};

const PROGRAM: &str = "perf-features";

/// All features on the host and in a guest of each model, in one boot. One write switches all counters of the host.
static RESULTS: LazyLock<Results> = LazyLock::new(|| {
    let path = program(PROGRAM);
    let bytes = fs::read(&path).expect("it has been built");
    let all = all();
    let steps = Steps::new("features")
        .in_guest(PROGRAM, bytes)
        .file(path, PROGRAM)
        .configure_host(|scenario| scenario.pmu(HostPmu::PerfMonV2))
        .step("host", &format!("echo 0 >/sys/bus/event_source/devices/cpu/rdpmc; {all}"));
    selected_models()
        .iter()
        .fold(steps, |steps, Model { pmu, .. }| {
            steps.step(pmu, &format!("./tally run --append cryptomgr.notests --pmu {pmu} -- sh -c '{all}'"))
        })
        .run()
});

/// The same on a RISC-V host.
static ON_RISCV: LazyLock<Results> = LazyLock::new(|| {
    let path = cross::program(PROGRAM, &mut Progress::stderr("lab"));
    let path = path.unwrap_or_else(|error| panic!("{error}"));
    let bytes = fs::read(&path).expect("it has been built");
    let all = all();
    Steps::on_riscv("features::on_riscv")
        .in_guest(PROGRAM, bytes)
        .file(path, PROGRAM)
        .step("host", &format!("echo 0 >/proc/sys/kernel/perf_user_access; {all}"))
        .step("guest", &format!("./tally run -- sh -c '{all}'"))
        .run()
});

/// Tries all features, and says of each how it ended.
fn all() -> String {
    format!("for name in $(./{PROGRAM}); do line=$(./{PROGRAM} $name 2>&1); echo $name $? $line; done")
}

/// The status with which a feature ended in a place, and what it said.
fn verdict(results: &Results, place: &str, feature: &str) -> (i32, String) {
    let done = results.of(place);
    let text = done.text();
    let mut lines = text.lines().filter_map(|line| line.strip_prefix(feature)?.strip_prefix(' '));
    let verdict = lines.next().and_then(|line| line.split_once(' '));
    let (status, said) = verdict.unwrap_or_else(|| panic!("no word of {feature}: {text}{}", done.err));
    (status.parse().expect("a status is a number"), said.to_owned())
}

fn keeps(results: &Results, place: &str, feature: &str) {
    let (status, said) = verdict(results, place, feature);
    assert_eq!(status, 0, "{place}: {feature}: {said}");
}

/// A test for each feature and place, and one that none is forgotten.
macro_rules! features {
    ($($test:ident: $feature:literal,)*) => {
        features!(@place on_the_host, ["host"], RESULTS, $($test: $feature,)*);
        features!(@place in_a_guest, super::selected_models().iter().map(|model| model.pmu), RESULTS, $($test: $feature,)*);
        features!(@place on_a_riscv_host, ["host"], ON_RISCV, $($test: $feature,)*);
        features!(@place in_a_riscv_guest, ["guest"], ON_RISCV, $($test: $feature,)*);

        /// Those that there are.
        const TESTED: &[&str] = &[$($feature),*];
    };
    (@place $name:ident, $places:expr, $results:ident, $($test:ident: $feature:literal,)*) => {
        mod $name {
            pub fn tests() -> Vec<guest_tests::suite::Test> {
                guest_tests::tests![$($test),*]
            }

            $(
                fn $test() {
                    for place in $places {
                        super::keeps(&super::$results, place, $feature);
                    }
                }
            )*
        }
    };
}

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    let on_riscv = [on_a_riscv_host::tests(), in_a_riscv_guest::tests()].concat();
    [tests![every_feature_has_its_test], on_the_host::tests(), in_a_guest::tests(), second_tier(on_riscv)]
        .concat()
}

fn every_feature_has_its_test() {
    let output = Command::new(program(PROGRAM)).output().expect("the program runs here too");
    assert_eq!(String::from_utf8_lossy(&output.stdout).lines().collect::<Vec<_>>(), TESTED);
}

features! {
    a_counter_counts_every_instruction: "counting",
    events_of_all_kinds_count_beside_each_other: "kinds",
    events_of_all_kinds_make_one_group: "kinds-in-a-group",
    user_mode_and_the_kernel_are_counted_apart: "modes",
    leaving_out_hypervisor_and_idle_changes_nothing: "hypervisor-and-idle",
    a_machine_without_guests_counts_nothing_without_the_host: "exclude-host",
    a_machine_without_guests_loses_nothing_without_them: "exclude-guest",
    programs_are_told_not_to_read_counters_themselves: "rdpmc-is-off",
    an_event_that_need_not_share_runs_all_the_time: "times",
    more_events_than_counters_take_turns: "multiplexing",
    a_pinned_event_does_not_take_turns: "pinned",
    a_pinned_event_without_room_reads_end_of_file: "pinned-without-room",
    an_exclusive_event_shares_with_nobody: "exclusive",
    a_group_is_on_the_pmu_as_a_whole: "group",
    a_group_of_more_than_all_counters_is_refused: "group-too-large",
    a_group_without_room_never_runs: "group-without-room",
    every_overflow_is_a_sample_at_its_instruction: "sampling",
    two_sampled_events_do_not_disturb_each_other: "sampling-side-by-side",
    all_counters_may_overflow_at_once: "sampling-on-all-counters",
    a_sample_has_the_counts_of_a_group: "sampling-a-group",
    a_changed_period_holds_at_once: "changed-period",
    a_buffer_that_is_read_loses_nothing: "ring-buffer",
    a_full_buffer_says_how_much_was_lost: "ring-buffer-full",
    mappings_names_and_children_are_recorded: "other-records",
    poll_wakes_up_as_often_as_asked: "wakeup-events",
    poll_waits_for_another_threads_samples: "poll",
    every_overflow_sends_a_signal: "signals",
    a_counter_may_stop_at_its_overflow: "refresh",
    a_counter_is_switched_by_ioctl: "ioctl",
    a_group_is_switched_by_ioctl: "ioctl-on-a-group",
    all_counters_of_a_task_are_switched_by_prctl: "prctl",
    a_tasks_counter_counts_no_other_task: "per-task",
    a_cpus_counter_counts_all_tasks: "per-cpu",
    an_inherited_counter_counts_children: "inherited",
    another_counter_does_not_count_children: "not-inherited",
    a_thread_that_watches_itself_gets_its_own_signals: "own-signal-on-own-thread",
    who_watches_itself_is_alone_on_the_pmu: "alone-on-the-pmu",
    of_two_pinned_events_the_first_wins: "first-pinned-wins",
    a_child_is_not_watched_but_may_watch_itself: "own-counter-stays-behind",
}
