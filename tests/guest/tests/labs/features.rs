//! Features of Linux' perf events, in guests and on the simulated hosts themselves, for both architectures.
//!
//! The program `perf-features` checks one feature at a time, to the exact instruction. One boot of each host runs all
//! of them on the host and in a guest of each model, and each test checks the results of its own feature.

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

/// Results of all features on the host and in a guest of each model. The host's PMU has PerfMonV2, whose global control
/// register switches all counters with one write.
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

/// Results of all features on a RISC-V host and in its guest.
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

/// Returns shell commands that check all features, and print a line with the name, status and output of each.
fn all() -> String {
    format!("for name in $(./{PROGRAM}); do line=$(./{PROGRAM} $name 2>&1); echo $name $? $line; done")
}

/// Returns the status and the output of a feature's check in a place (the host, or a model's guest).
fn verdict(results: &Results, place: &str, feature: &str) -> (i32, String) {
    let done = results.of(place);
    let text = done.text();
    let mut lines = text.lines().filter_map(|line| line.strip_prefix(feature)?.strip_prefix(' '));
    let verdict = lines.next().and_then(|line| line.split_once(' '));
    let (status, message) = verdict.unwrap_or_else(|| panic!("no result of {feature}: {text}{}", done.err));
    (status.parse().expect("a status is a number"), message.to_owned())
}

fn assert_works(results: &Results, place: &str, feature: &str) {
    let (status, message) = verdict(results, place, feature);
    assert_eq!(status, 0, "{place}: {feature}: {message}");
}

/// Defines a test for each feature and place. `every_feature_has_its_test` checks that the list is complete.
macro_rules! features {
    ($($test:ident: $feature:literal,)*) => {
        features!(@place on_the_host, ["host"], RESULTS, $($test: $feature,)*);
        features!(@place in_a_guest, super::selected_models().iter().map(|model| model.pmu), RESULTS, $($test: $feature,)*);
        features!(@place on_a_riscv_host, ["host"], ON_RISCV, $($test: $feature,)*);
        features!(@place in_a_riscv_guest, ["guest"], ON_RISCV, $($test: $feature,)*);

        /// All features with a test.
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
                        super::assert_works(&super::$results, place, $feature);
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
    exclude_hv_and_exclude_idle_change_nothing: "hypervisor-and-idle",
    exclude_host_counts_nothing_without_guests: "exclude-host",
    exclude_guest_changes_nothing_without_guests: "exclude-guest",
    user_mode_rdpmc_is_disabled: "rdpmc-is-off",
    an_event_without_multiplexing_runs_all_the_time: "times",
    more_events_than_counters_are_multiplexed: "multiplexing",
    a_pinned_event_is_not_multiplexed: "pinned",
    a_pinned_event_without_room_reads_end_of_file: "pinned-without-room",
    an_exclusive_event_has_the_pmu_to_itself: "exclusive",
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
    a_counter_can_stop_at_its_overflow: "refresh",
    a_counter_is_switched_by_ioctl: "ioctl",
    a_group_is_switched_by_ioctl: "ioctl-on-a-group",
    all_counters_of_a_task_are_switched_by_prctl: "prctl",
    a_tasks_counter_counts_no_other_task: "per-task",
    a_cpus_counter_counts_all_tasks: "per-cpu",
    an_inherited_counter_counts_children: "inherited",
    a_counter_without_inherit_does_not_count_children: "not-inherited",
    a_self_monitoring_thread_gets_its_signals: "own-signal-on-own-thread",
    a_self_monitoring_program_is_alone_on_the_pmu: "alone-on-the-pmu",
    of_two_pinned_events_the_first_wins: "first-pinned-wins",
    a_child_is_not_monitored_but_can_monitor_itself: "own-counter-stays-behind",
}
