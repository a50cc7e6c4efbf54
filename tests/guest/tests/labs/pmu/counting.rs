//! Counts of loops whose length is known.

use guest_tests::lab::Steps;
use guest_tests::suite::Test;
use guest_tests::tests;

use crate::pmu::registers::{intel, write, writes};
use crate::pmu::{ALL, AMD, INTEL, Pmu, QUICK, on_each, on_each_its_own, said};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    tests![
        a_loop_in_kernel_mode_counts_two_instructions_a_round,
        a_loop_in_user_mode_counts_to_the_instruction_on_each_counter,
        counters_count_in_the_modes_that_they_select,
        events_are_those_that_the_host_has,
        an_event_that_the_host_lacks_stands_still_and_the_operator_hears_of_each,
        a_fixed_counter_counts_its_own_event_in_the_modes_that_it_is_told,
        one_of_host_only_and_guest_only_stops_a_counter_as_without_svm,
    ]
}

pub fn guests(steps: Steps) -> Steps {
    let each = |words: &dyn Fn(u32) -> String| (0..4).map(words).collect::<Vec<_>>().join(" ");
    let steps = on_each(
        steps,
        &ALL,
        "kernel-mode",
        "count=0:0x4200c0,1000 count=0:0x4200c0,101000 count=0:0x4300c0,1000 count=0:0x4300c0,101000",
    );
    let steps = on_each(
        steps,
        &ALL,
        "user-mode",
        &each(&|counter| format!("count-user=0:0x4100c0,10000000,{counter}")),
    );
    let steps = on_each(
        steps,
        &ALL,
        "filters",
        "count=0:0x4100c0,1000 count=0:0x4000c0,1000 count-user=0:0x4000c0,1000 \
         count-user=0:0x4200c0,1000 count-user=0:0x4200c0,101000",
    );
    let steps = on_each_its_own(steps, &ALL, "events", |pmu| {
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

/// Selects, and what they count of the user's loop of 1000 rounds, of DEC, JNZ, and an INT behind it.
fn events(pmu: Pmu) -> &'static [(u32, u64)] {
    if pmu.is_intel() { &INTEL_EVENTS } else { &AMD_EVENTS }
}

/// The architectural events, as far as this host has them: cycles, instructions, branches and mispredicted ones.
const INTEL_EVENTS: [(u32, u64); 4] =
    [(0x41_003c, 2001), (0x41_00c0, 2001), (0x41_00c4, 1000), (0x41_00c5, 1)];

/// What this host does not have of Intel's: bus cycles and the last-level cache, events of one processor or of none, and
/// thresholds, their opposite, and edges.
const REFUSED: [u32; 8] =
    [0x41_013c, 0x41_4f2e, 0x41_412e, 0x41_01d1, 0x41_00ff, 0x0141_00c4, 0x01c1_00c4, 0x0145_00c4];

/// The numbers of the fixed counters, of instructions and of cycles.
const FIXED: [u32; 2] = [4, 5];

const AMD_EVENTS: [(u32, u64); 11] = [
    (0x41_0076, 2001),
    (0x41_00c0, 2001),
    (0x41_00c2, 1000),
    (0x41_00c3, 1),
    (0x41_00c4, 999),
    (0x41_00d1, 1000),
    // Nothing has this number.
    (0x41_00ff, 0),
    // Cycles with at least one branch, with at least two, with less than one; how often they begin to have one.
    (0x0141_00c2, 1000),
    (0x0241_00c2, 0),
    (0x01c1_00c2, 1001),
    (0x0145_00c2, 1000),
];

/// The counts that a guest printed.
fn counts(pmu: Pmu, name: &str) -> Vec<u64> {
    counts_in(&said(pmu, name))
}

fn counts_in(text: &str) -> Vec<u64> {
    let count = |line: &str| {
        let value = line.strip_prefix("count ")?.split(' ').nth(1)?;
        u64::from_str_radix(value, 16).ok()
    };
    text.lines().map(|line| count(line).unwrap_or_else(|| panic!("{line}"))).collect()
}

fn a_loop_in_kernel_mode_counts_two_instructions_a_round() {
    for pmu in ALL {
        let counts = counts(pmu, "kernel-mode");
        assert_eq!(counts[1] - counts[0], 200_000, "{pmu:?}");
        assert_eq!(counts[2..], counts[..2], "user mode adds nothing: {pmu:?}");
        // Around the loop are its call, its end, and the way out of and into the writes of the select register.
        assert!((2000..2100).contains(&counts[0]), "{pmu:?}: {}", counts[0]);
    }
}

fn a_loop_in_user_mode_counts_to_the_instruction_on_each_counter() {
    for pmu in ALL {
        assert_eq!(counts(pmu, "user-mode"), [20_000_001; 4], "{pmu:?}");
    }
}

fn counters_count_in_the_modes_that_they_select() {
    for pmu in ALL {
        let counts = counts(pmu, "filters");
        assert_eq!(counts[..3], [0, 0, 0], "{pmu:?}");
        assert_eq!(counts[3], counts[4], "the kernel's part does not depend on the user's: {pmu:?}");
        assert!((1..100).contains(&counts[3]), "{pmu:?}: {}", counts[3]);
    }
}

fn events_are_those_that_the_host_has() {
    for pmu in ALL {
        let wanted: Vec<_> = events(pmu).iter().map(|(_, count)| *count).collect();
        assert_eq!(counts(pmu, "events"), wanted, "{pmu:?}");
    }
}

fn an_event_that_the_host_lacks_stands_still_and_the_operator_hears_of_each() {
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

fn a_fixed_counter_counts_its_own_event_in_the_modes_that_it_is_told() {
    for pmu in INTEL {
        let text = said(pmu, "fixed-modes");
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

fn one_of_host_only_and_guest_only_stops_a_counter_as_without_svm() {
    for pmu in AMD {
        assert_eq!(counts(pmu, "host-and-guest-only"), [0, 0, 2001], "{pmu:?}");
    }
}
