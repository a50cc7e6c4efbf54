//! Tests of counts, with loops of known length.

use guest_tests::host::{self, Host};
use guest_tests::lab::Steps;
use guest_tests::suite::Test;
use guest_tests::tests;

use crate::pmu::registers::{intel, write, writes};
use crate::pmu::{AMD, INTEL, Pmu, QUICK, all, on_each, on_each_with, printed};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    [on_any_host(), tests![events_that_the_host_lacks_count_nothing_and_are_reported]].concat()
}

/// The tests that hold on every host.
pub fn on_any_host() -> Vec<Test> {
    tests![
        a_kernel_mode_loop_counts_two_instructions_per_round,
        a_user_mode_loop_is_counted_exactly_on_each_counter,
        counters_count_only_in_the_selected_modes,
        events_count_what_the_hosts_events_count,
        fixed_counters_count_their_event_in_the_selected_modes,
        host_only_or_guest_only_alone_stops_a_counter_as_without_svm,
    ]
}

pub fn guests(steps: Steps) -> Steps {
    let each = |words: &dyn Fn(u32) -> String| (0..4).map(words).collect::<Vec<_>>().join(" ");
    let steps = on_each(
        steps,
        all(),
        "kernel-mode",
        "count=0:0x4200c0,1000 count=0:0x4200c0,101000 count=0:0x4300c0,1000 count=0:0x4300c0,101000",
    );
    let steps = on_each(
        steps,
        all(),
        "user-mode",
        &each(&|counter| format!("count-user=0:0x4100c0,10000000,{counter}")),
    );
    let steps = on_each(
        steps,
        all(),
        "filters",
        "count=0:0x4100c0,1000 count=0:0x4000c0,1000 count-user=0:0x4000c0,1000 \
         count-user=0:0x4200c0,1000 count-user=0:0x4200c0,101000",
    );
    let steps = on_each_with(steps, all(), "events", |pmu| {
        let count = |(select, _): &(u32, u64)| format!("count-user=0:{select:#x},1000");
        events(pmu).iter().map(count).collect::<Vec<_>>().join(" ")
    });
    let steps = on_each(
        steps,
        &AMD,
        "host-and-guest-only",
        "count-user=0x100:0x4100c0,1000 count-user=0x200:0x4100c0,1000 count-user=0x300:0x4100c0,1000",
    );
    let refused = REFUSED.map(|select| format!("count-user=0:{select:#x},1000")).join(" ");
    let steps = on_each(steps, &INTEL, "refused", &refused);
    let fixed = FIXED.map(|counter| {
        format!(
            "count-user=0:0x4100ff,10000000,{counter} count-user=0:0x4000ff,1000,{counter} \
             count-user=0:0x4200ff,1000,{counter} count-user=0:0x4200ff,101000,{counter} \
             count=0:0x4200ff,1000,{counter} count=0:0x4200ff,101000,{counter}"
        )
    });
    on_each(steps, &INTEL, "fixed-modes", &(write(intel::GLOBAL_CONTROL, intel::COUNTERS) + &fixed.join(" ")))
}

/// Returns event selects and their counts for a user-mode loop of 1000 rounds of DEC and JNZ, with an INT behind it.
fn events(pmu: Pmu) -> &'static [(u32, u64)] {
    match (pmu.is_intel(), host::current()) {
        (true, _) => &INTEL_EVENTS,
        (false, Host::Amd) => &AMD_EVENTS,
        (false, Host::Intel) => &AMD_EVENTS[..ARCHITECTURAL],
    }
}

/// The architectural events that this host has: cycles, instructions, branches and mispredicted branches.
const INTEL_EVENTS: [(u32, u64); 4] =
    [(0x41_003c, 2001), (0x41_00c0, 2001), (0x41_00c4, 1000), (0x41_00c5, 1)];

/// Intel's event selects that this host has no counterpart for: bus cycles and last-level cache events, model-specific
/// and undefined events, and counting by threshold (CMASK), inverted threshold and edges.
const REFUSED: [u32; 8] =
    [0x41_013c, 0x41_4f2e, 0x41_412e, 0x41_01d1, 0x41_00ff, 0x0141_00c4, 0x01c1_00c4, 0x0145_00c4];

/// Numbers of the fixed counters for instructions and for cycles.
const FIXED: [u32; 2] = [4, 5];

/// Number of AMD's events that Intel's processors have as well.
const ARCHITECTURAL: usize = 4;
/// AMD's events: event selects and their counts.
const AMD_EVENTS: [(u32, u64); 11] = [
    (0x41_0076, 2001),
    (0x41_00c0, 2001),
    (0x41_00c2, 1000),
    (0x41_00c3, 1),
    (0x41_00c4, 999),
    (0x41_00d1, 1000),
    // This event is undefined.
    (0x41_00ff, 0),
    // Branches with CMASK: cycles with at least one branch, with at least two, with none (INV), and edges.
    (0x0141_00c2, 1000),
    (0x0241_00c2, 0),
    (0x01c1_00c2, 1001),
    (0x0145_00c2, 1000),
];

/// Returns the counts that a guest printed.
fn counts(pmu: Pmu, name: &str) -> Vec<u64> {
    counts_in(&printed(pmu, name))
}

fn counts_in(text: &str) -> Vec<u64> {
    let count = |line: &str| {
        let value = line.strip_prefix("count ")?.split(' ').nth(1)?;
        u64::from_str_radix(value, 16).ok()
    };
    text.lines().map(|line| count(line).unwrap_or_else(|| panic!("{line}"))).collect()
}

fn a_kernel_mode_loop_counts_two_instructions_per_round() {
    for &pmu in all() {
        let counts = counts(pmu, "kernel-mode");
        assert_eq!(counts[1] - counts[0], 200_000, "{pmu:?}");
        assert_eq!(counts[2..], counts[..2], "user mode adds nothing: {pmu:?}");
        // The count includes the call and the return around the loop, and the code between these and the writes of the
        // select.
        assert!((2000..2100).contains(&counts[0]), "{pmu:?}: {}", counts[0]);
    }
}

fn a_user_mode_loop_is_counted_exactly_on_each_counter() {
    for &pmu in all() {
        assert_eq!(counts(pmu, "user-mode"), [20_000_001; 4], "{pmu:?}");
    }
}

fn counters_count_only_in_the_selected_modes() {
    for &pmu in all() {
        let counts = counts(pmu, "filters");
        assert_eq!(counts[..3], [0, 0, 0], "{pmu:?}");
        assert_eq!(counts[3], counts[4], "the kernel's part does not depend on the user's: {pmu:?}");
        assert!((1..100).contains(&counts[3]), "{pmu:?}: {}", counts[3]);
    }
}

fn events_count_what_the_hosts_events_count() {
    for &pmu in all() {
        // Intel's processors count the INT as a branch of the mode that it comes from, AMD's in its handler's mode.
        let is_branches = |select: u32| [0xc2, 0xc4].contains(&(select & 0xff));
        let on_intel = |select| u64::from(host::current() == Host::Intel && is_branches(select));
        let wanted: Vec<_> = events(pmu).iter().map(|(select, count)| count + on_intel(*select)).collect();
        assert_eq!(counts(pmu, "events"), wanted, "{pmu:?}");
    }
}

fn events_that_the_host_lacks_count_nothing_and_are_reported() {
    for pmu in INTEL {
        let done = QUICK.of(&pmu.step("refused"));
        assert_eq!(counts_in(&done.text()), [0; REFUSED.len()], "{pmu:?}");
        let refusals =
            done.err.lines().filter(|line| line.starts_with("tally: vCPU 0: counter 0 stands still: "));
        assert_eq!(
            (refusals.count(), done.err.lines().count()),
            (REFUSED.len(), REFUSED.len()),
            "{}",
            done.err
        );
    }
}

fn fixed_counters_count_their_event_in_the_selected_modes() {
    for pmu in INTEL {
        let text = printed(pmu, "fixed-modes");
        let counts = text.strip_prefix(&writes(intel::GLOBAL_CONTROL)).map(counts_in);
        let counts = counts.unwrap_or_else(|| panic!("{pmu:?}: {text}"));
        for counts in counts.chunks(6) {
            assert_eq!(counts[..2], [20_000_001, 0], "{pmu:?}");
            assert_eq!(counts[2], counts[3], "the kernel's part does not depend on the user's: {pmu:?}");
            assert_eq!(counts[5] - counts[4], 200_000, "{pmu:?}");
        }
        assert_eq!(counts.len(), 6 * FIXED.len(), "{pmu:?}");
    }
}

fn host_only_or_guest_only_alone_stops_a_counter_as_without_svm() {
    for pmu in AMD {
        assert_eq!(counts(pmu, "host-and-guest-only"), [0, 0, 2001], "{pmu:?}");
    }
}
