//! Counts of loops whose length is known.

use guest_tests::lab::Steps;

use crate::{ALL, OURS, Pmu, on_each, said};

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
    let events = EVENTS.map(|(select, _)| format!("count-user=0:{select:#x},1000")).join(" ");
    let steps = on_each(steps, &ALL, "events", &events);
    on_each(
        steps,
        &ALL,
        "host-and-guest-only",
        "count-user=0x100:0x4100c0,1000 count-user=0x200:0x4100c0,1000 count-user=0x300:0x4100c0,1000",
    )
}

/// The user's loop of 1000 rounds, of DEC, JNZ, and an INT behind it, in different events.
const EVENTS: [(u32, u64); 11] = [
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
    let count = |line: &str| {
        let value = line.strip_prefix("count ")?.split(' ').nth(1)?;
        u64::from_str_radix(value, 16).ok()
    };
    let text = said(pmu, name);
    text.lines().map(|line| count(line).unwrap_or_else(|| panic!("{name} on {pmu:?}: {line}"))).collect()
}

#[test]
fn a_loop_in_kernel_mode_counts_two_instructions_a_round() {
    for pmu in ALL {
        let counts = counts(pmu, "kernel-mode");
        assert_eq!(counts[1] - counts[0], 200_000, "{pmu:?}");
        assert_eq!(counts[2..], counts[..2], "user mode adds nothing: {pmu:?}");
        // Around the loop are its call, its end, and the way out of and into the writes of the select register.
        assert!((2000..2100).contains(&counts[0]), "{pmu:?}: {}", counts[0]);
    }
}

#[test]
fn a_loop_in_user_mode_counts_to_the_instruction_on_each_counter() {
    for pmu in ALL {
        assert_eq!(counts(pmu, "user-mode"), [20_000_001; 4], "{pmu:?}");
    }
}

#[test]
fn counters_count_in_the_modes_that_they_select() {
    for pmu in ALL {
        let counts = counts(pmu, "filters");
        assert_eq!(counts[..3], [0, 0, 0], "{pmu:?}");
        assert_eq!(counts[3], counts[4], "the kernel's part does not depend on the user's: {pmu:?}");
        assert!((1..100).contains(&counts[3]), "{pmu:?}: {}", counts[3]);
    }
}

#[test]
fn events_are_those_that_the_host_has() {
    for pmu in ALL {
        assert_eq!(counts(pmu, "events"), EVENTS.map(|(_, count)| count), "{pmu:?}");
    }
}

#[test]
fn one_of_host_only_and_guest_only_stops_a_counter_as_without_svm() {
    for pmu in OURS {
        assert_eq!(counts(pmu, "host-and-guest-only"), [0, 0, 2001], "{pmu:?}");
    }
}
