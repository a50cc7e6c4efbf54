//! Features of Linux' perf events, in guests and on the simulated hosts themselves, for both architectures.
//!
//! The program `perf-features` checks one feature at a time, to the exact instruction. One boot of each host runs all
//! of them on the host and in a guest of each model, and each test checks the results of its own feature.

use std::fs;
use std::process::Command;
use std::sync::LazyLock;

use guest_images::Progress;
use guest_tests::host::{self, Host};
use guest_tests::lab::{OnEachHost, Results, Steps};
use guest_tests::model::{Model, selected_models};
use guest_tests::program;
use guest_tests::suite::{Test, on_intel, second_tier};
use guest_tests::tests;
use tally_lab::{HostPmu, Perfmon, cross};

const PROGRAM: &str = "perf-features";

/// Results of all features on the host and in a guest of each model. The host's PMU has PerfMonV2, whose global control
/// register switches all counters with one write.
///
/// The program expects six counters for instructions and cycles. The older Intel PMU has them: four general ones, and a
/// fixed one for each of the two.
static RESULTS: OnEachHost = OnEachHost::new(|| {
    let steps = steps("features").step("host", &all());
    let guest = |steps, pmu: &str| with_guest(steps, pmu);
    match host::current() {
        Host::Amd => {
            let steps = steps.configure_host(|scenario| scenario.pmu(HostPmu::PerfMonV2));
            selected_models().iter().fold(steps, |steps, Model { pmu, .. }| guest(steps, pmu))
        }
        Host::Intel => {
            guest(steps.configure_host(|scenario| scenario.pmu(HostPmu::Intel(Perfmon::V4))), "intel")
        }
    }
    .run()
});

/// Results of all features in a guest with AMD's PMU on the Intel host, which needs six general counters.
static AMD_ON_INTEL: LazyLock<Results> =
    LazyLock::new(|| with_guest(steps("features::amd_on_intel"), "amd").run());

fn steps(name: &'static str) -> Steps {
    let path = program(PROGRAM);
    let bytes = fs::read(&path).expect("it has been built");
    Steps::new(name).in_guest(PROGRAM, bytes).file(path, PROGRAM)
}

fn with_guest(steps: Steps, pmu: &str) -> Steps {
    steps.step(pmu, &format!("./tally run --pmu {pmu} -- sh -c '{}'", all()))
}

/// Returns the PMUs of the guests.
fn guests() -> Vec<&'static str> {
    match host::current() {
        Host::Amd => selected_models().iter().map(|model| model.pmu).collect(),
        Host::Intel => vec!["intel", "amd"],
    }
}

/// Returns the results that have a place on an x86-64 host.
fn results(place: &str) -> &'static Results {
    if host::current() == Host::Intel && place == "amd" { &AMD_ON_INTEL } else { &RESULTS }
}

/// Results of all features on a RISC-V host and in its guest.
static ON_RISCV: LazyLock<Results> = LazyLock::new(|| {
    let path = cross::program(PROGRAM, &mut Progress::stderr("lab"));
    let path = path.unwrap_or_else(|error| panic!("{error}"));
    let bytes = fs::read(&path).expect("it has been built");
    let all = all();
    Steps::on_riscv("features::on_riscv")
        .in_guest(PROGRAM, bytes)
        .file(path, PROGRAM)
        .step("host", &all)
        .step("guest", &format!("./tally run -- sh -c '{all}'"))
        .run()
});

/// Returns shell commands that check all features, and print a line with the name, status and output of each. Programs
/// may not read counters themselves.
fn all() -> String {
    format!(
        "for switch in /sys/bus/event_source/devices/cpu/rdpmc /proc/sys/kernel/perf_user_access; do \
             [ ! -e $switch ] || echo 0 >$switch; done; for name in $(./{PROGRAM}); do line=$(./{PROGRAM} $name 2>&1); echo $name $? $line; done"
    )
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

/// The feature that counts an event of AMD's only: conditional branches.
const WITH_AN_EVENT_OF_AMDS: &str = "kinds";

fn assert_works(results: &Results, place: &str, feature: &str) {
    let (status, message) = verdict(results, place, feature);
    if host::current() == Host::Intel && place == "amd" && feature == WITH_AN_EVENT_OF_AMDS {
        let notice = "the host refuses rd1:u (an event of the guest's vendor only)";
        assert!(results.of(place).err.contains(notice), "{}", results.of(place).err);
        assert!(message.contains("[2000006, 1000001, 2000006, 1000001, 0]"), "{status}: {message}");
        return;
    }
    assert_eq!(status, 0, "{place}: {feature}: {message}");
}

/// Defines a test for each feature and place. `every_feature_has_its_test` checks that the list is complete.
macro_rules! features {
    ($($test:ident: $feature:literal,)*) => {
        features!(@place on_the_host, ["host"], super::results, $($test: $feature,)*);
        features!(@place in_a_guest, super::guests(), super::results, $($test: $feature,)*);
        features!(@place on_a_riscv_host, ["host"], |_| &super::ON_RISCV, $($test: $feature,)*);
        features!(@place in_a_riscv_guest, ["guest"], |_| &super::ON_RISCV, $($test: $feature,)*);

        const TESTED: &[&str] = &[$($feature),*];
    };
    (@place $name:ident, $places:expr, $results:expr, $($test:ident: $feature:literal,)*) => {
        mod $name {
            pub fn tests() -> Vec<guest_tests::suite::Test> {
                guest_tests::tests![$($test),*]
            }

            $(
                fn $test() {
                    for place in $places {
                        super::assert_works(($results)(place), place, $feature);
                    }
                }
            )*
        }
    };
}

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    let on_riscv = [on_a_riscv_host::tests(), in_a_riscv_guest::tests()].concat();
    let second = second_tier([on_intel(on_x86()), on_riscv].concat());
    [tests![every_feature_has_its_test], on_x86(), second].concat()
}

pub fn on_x86() -> Vec<Test> {
    [on_the_host::tests(), in_a_guest::tests()].concat()
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
