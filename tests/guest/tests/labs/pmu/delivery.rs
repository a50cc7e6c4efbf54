//! Tests of overflow interrupts: their number, the guest's RIP, and the counters' values in the handler.
//!
//! The guest's loop in user mode has two instructions per round, at adjacent addresses. Its counters count in user mode
//! only, so only the loop changes them. A handler whose interrupt arrived directly behind the overflowing instruction
//! reads 0.

use guest_tests::lab::Steps;
use guest_tests::suite::{Test, second_tier};
use guest_tests::tests;

use crate::pmu::registers::{intel, read, reads, write, writes};
use crate::pmu::{INTEL, LONG, Pmu, all, on_each, on_each_with, output, printed};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    let second = tests![a_hundred_thousand_overflows_are_a_hundred_thousand_interrupts,];
    [on_any_host(), second_tier(second)].concat()
}

/// The tests that hold on every host.
pub fn on_any_host() -> Vec<Test> {
    tests![
        an_nmi_arrives_directly_behind_the_overflowing_instruction,
        a_fixed_interrupt_is_as_exact_as_an_nmi,
        with_interrupts_off_a_fixed_interrupt_is_delivered_once_later,
        a_masked_overflow_sets_only_its_status_bit,
        a_disabled_apic_delivers_no_interrupt_then_or_later,
        the_handler_sees_all_counters_that_overflow_together,
        a_fixed_counter_overflows_as_exactly_as_a_general_one,
        a_counter_without_its_interrupt_bit_raises_none,
        every_event_overflows_exactly,
        an_x2apic_delivers_the_same_interrupts,
        every_processor_gets_its_own_interrupts,
        intels_interrupt_masks_the_lvt_entry_in_x2apic_mode_but_not_in_xapic_mode,
        a_counted_handler_counts_itself_unless_the_interrupt_freezes_counters,
        a_freeze_lasts_until_a_late_handler_runs,
        a_freeze_shows_in_global_status_of_version_5_and_in_global_control_of_version_2,
        a_freeze_ends_by_clearing_status_in_version_5_and_by_writing_control_in_version_2,
    ]
}

/// Guests of all PMUs: name and words.
const GUESTS: [(&str, &str); 17] = [
    ("nmi", "pmi=nmi,5,10000"),
    ("odd", "pmi=nmi,5,10001"),
    ("short", "pmi=nmi,100,100"),
    ("fixed", "pmi=fixed,5,10000"),
    ("masked", "pmi=masked,5,10000"),
    ("svr-off", "pmi=svr-off,5,10000"),
    ("apic-off", "pmi=apic-off,5,10000"),
    ("cli", "pmi=cli,5,10000"),
    ("again", "pmi=masked,5,10000 pmi=svr-off,5,10000 pmi=apic-off,5,10000 pmi=nmi,5,10000"),
    ("once", "pmi=once,5,10000 x2apic pmi=once,5,10000"),
    ("two", "pmi=nmi,5,10000,0x3"),
    ("four", "pmi=nmi,5,10000,0xf"),
    ("all", "pmi=nmi,5,10000,0x3f"),
    ("silent", "pmi=nmi,5,10000,1,0:0x4100c0"),
    ("kernel", "pmi=nmi,5,10000,1,0:0x5300c0"),
    ("x2apic", "x2apic pmi=nmi,5,10000 pmi=fixed,5,10000 pmi=masked,5,10000 pmi=svr-off,5,10000"),
    ("processors", "smp=2 pmi=nmi,50,10000 x2apic pmi=fixed,50,10000"),
];

/// Events: name, and event select on AMD's and on Intel's PMUs.
const EVENTS: [(&str, u32, u32); 2] = [("branches", 0x51_00c2, 0x51_00c4), ("cycles", 0x51_0076, 0x51_003c)];

/// Fixed counters: name and number.
const FIXED: [(&str, u32); 2] = [("fixed-instructions", 4), ("fixed-cycles", 5)];

/// Guests whose overflow interrupts freeze all counters: name and words. They finally print global control and status.
const FROZEN: [(&str, &str); 4] = [
    ("frozen-kernel", "pmi=nmi,5,10000,1,0:0x5300c0"),
    ("frozen-cli", "pmi=cli,5,10000"),
    ("frozen-masked", "pmi=masked,5,10000"),
    ("frozen-once", "pmi=once,5,10000"),
];

pub fn guests(steps: Steps) -> Steps {
    let steps = GUESTS.iter().fold(steps, |steps, (name, words)| on_each(steps, all(), name, words));
    let steps = EVENTS.iter().fold(steps, |steps, (name, amd, intel)| {
        on_each_with(steps, all(), name, |pmu| {
            format!("pmi=nmi,5,10000,1,0:{:#x}", if pmu.is_intel() { intel } else { amd })
        })
    });
    let steps = FIXED.iter().fold(steps, |steps, (name, counter)| {
        let set = 1 << counter;
        let words = format!("pmi=nmi,5,10000,{set} pmi=nmi,5,10001,{set} pmi=fixed,5,10000,{set}");
        on_each(steps, &INTEL, name, &words)
    });
    FROZEN.iter().fold(steps, |steps, (name, words)| {
        let words = write(intel::DEBUG_CONTROL, intel::FREEZE)
            + words
            + " "
            + &read(intel::GLOBAL_CONTROL)
            + &read(intel::GLOBAL_STATUS);
        on_each(steps, &INTEL, name, &words)
    })
}

pub fn long_guests(steps: Steps) -> Steps {
    steps.second_tier(|steps| steps.bare_metal("hundred-thousand", Pmu::V2.options(), "pmi=nmi,100000,10000"))
}

/// Returns the printed bits of global status, which are 0 on PMUs without this register.
fn status(pmu: Pmu, bits: u32) -> String {
    let bits = if pmu == Pmu::V2 || pmu.is_intel() { bits } else { 0 };
    format!("{bits:02x}")
}

/// Returns what a guest prints if each overflow raised an interrupt directly behind its instruction. `entry` is the LVT
/// entry.
fn all_delivered(pmu: Pmu, overflows: u32, entry: u32) -> String {
    let status = status(pmu, 1);
    format!(
        "pmi {overflows} interrupts, {overflows} overflows, at 0..0, value 0..0, status {status}, left 00, \
         entry {entry:08x}, 0 late\n"
    )
}

/// Returns what a guest prints if its overflow raised no interrupt. `entry` is the LVT entry.
fn none_delivered(entry: u32) -> String {
    format!("pmi 0 interrupts, 0 overflows, at -, value -, status 00, left 01, entry {entry:08x}, 0 late\n")
}

/// Returns what a guest with Intel's PMU prints when it reads global control and status.
fn global(control: u64, status: u64) -> String {
    reads(intel::GLOBAL_CONTROL, control) + &reads(intel::GLOBAL_STATUS, status)
}

const NMI: u32 = 0x400;
const FIXED_VECTOR: u32 = 0x50;
const MASKED_NMI: u32 = 0x10400;

fn an_nmi_arrives_directly_behind_the_overflowing_instruction() {
    for &pmu in all() {
        assert_eq!(printed(pmu, "nmi"), all_delivered(pmu, 5, NMI), "{pmu:?}");
        assert_eq!(printed(pmu, "short"), all_delivered(pmu, 100, NMI), "{pmu:?}");
        // With an odd period, every second overflow is at the loop's other instruction.
        assert_eq!(printed(pmu, "odd"), all_delivered(pmu, 5, NMI).replace("at 0..0", "at 0..1"), "{pmu:?}");
    }
}

fn a_hundred_thousand_overflows_are_a_hundred_thousand_interrupts() {
    assert_eq!(output(LONG.of("hundred-thousand")), all_delivered(Pmu::V2, 100_000, NMI));
}

fn a_fixed_interrupt_is_as_exact_as_an_nmi() {
    for &pmu in all() {
        assert_eq!(printed(pmu, "fixed"), all_delivered(pmu, 5, FIXED_VECTOR), "{pmu:?}");
    }
}

fn with_interrupts_off_a_fixed_interrupt_is_delivered_once_later() {
    for &pmu in all() {
        let text = printed(pmu, "cli");
        assert!(text.starts_with("pmi 0 interrupts, 1 overflows, "), "{pmu:?}: {text}");
        // The loop counts to 50003, of which 10000 are before the overflow.
        let rest =
            format!("value 40003..40003, status {}, left 01, entry 00000050, 1 late\n", status(pmu, 1));
        assert!(text.ends_with(&rest), "{pmu:?}: {text}");
    }
}

fn a_masked_overflow_sets_only_its_status_bit() {
    for &pmu in all() {
        assert_eq!(printed(pmu, "masked"), none_delivered(MASKED_NMI), "{pmu:?}");
    }
}

fn a_disabled_apic_delivers_no_interrupt_then_or_later() {
    for &pmu in all() {
        assert_eq!(
            printed(pmu, "svr-off"),
            none_delivered(MASKED_NMI),
            "a software-disabled APIC masks its LVT entries: {pmu:?}"
        );
        assert_eq!(printed(pmu, "apic-off"), none_delivered(NMI), "{pmu:?}");
        let again = none_delivered(MASKED_NMI)
            + &none_delivered(MASKED_NMI)
            + &none_delivered(NMI)
            + &all_delivered(pmu, 5, NMI);
        assert_eq!(printed(pmu, "again"), again, "and then it delivers again: {pmu:?}");
    }
}

fn the_handler_sees_all_counters_that_overflow_together() {
    for &pmu in all() {
        for (name, counters) in [("two", 2), ("four", 4), ("all", pmu.counters() + pmu.fixed_counters())] {
            let one = all_delivered(pmu, 5, NMI);
            let all = one
                .replace("5 overflows", &format!("{} overflows", 5 * counters))
                .replace("status 01", &format!("status {:02x}", (1 << counters) - 1));
            assert_eq!(printed(pmu, name), all, "{pmu:?}");
        }
    }
}

fn a_fixed_counter_overflows_as_exactly_as_a_general_one() {
    for pmu in INTEL {
        for (name, counter) in FIXED {
            let one = all_delivered(pmu, 5, NMI);
            let all = one.clone() + &one.replace("at 0..0", "at 0..1") + &all_delivered(pmu, 5, FIXED_VECTOR);
            let all = all.replace("status 01", &format!("status {:02x}", 1 << counter));
            assert_eq!(printed(pmu, name), all, "{pmu:?}");
        }
    }
}

fn a_counter_without_its_interrupt_bit_raises_none() {
    for &pmu in all() {
        assert_eq!(printed(pmu, "silent"), none_delivered(NMI), "{pmu:?}");
    }
}

fn every_event_overflows_exactly() {
    for &pmu in all() {
        assert_eq!(printed(pmu, "cycles"), all_delivered(pmu, 5, NMI), "{pmu:?}");
        // Half of the loop's instructions are branches.
        assert_eq!(printed(pmu, "branches"), all_delivered(pmu, 2, NMI), "{pmu:?}");
    }
}

fn an_x2apic_delivers_the_same_interrupts() {
    for &pmu in all() {
        let all = all_delivered(pmu, 5, NMI)
            + &all_delivered(pmu, 5, FIXED_VECTOR)
            + &none_delivered(MASKED_NMI)
            + &none_delivered(MASKED_NMI);
        assert_eq!(printed(pmu, "x2apic"), all, "{pmu:?}");
    }
}

fn every_processor_gets_its_own_interrupts() {
    for &pmu in all() {
        let (nmi, fixed) = (all_delivered(pmu, 50, NMI), all_delivered(pmu, 50, FIXED_VECTOR));
        assert_eq!(printed(pmu, "processors"), format!("processors 2\n{nmi}{nmi}{fixed}{fixed}"), "{pmu:?}");
    }
}

/// This handler does not unmask the LVT entry, as a handler on Intel's processors must. Tally masks the entry only in
/// x2APIC mode, where the entry is an MSR. In xAPIC mode Tally could only write all APIC registers at once, and that
/// would undo concurrent changes.
fn intels_interrupt_masks_the_lvt_entry_in_x2apic_mode_but_not_in_xapic_mode() {
    for &pmu in all() {
        let in_memory = all_delivered(pmu, 5, NMI);
        let in_msrs = if pmu.is_intel() {
            "pmi 1 interrupts, 1 overflows, at 0..0, value 0..0, status 01, left 01, entry 00010400, 0 late\n"
        } else {
            &in_memory
        };
        assert_eq!(printed(pmu, "once"), format!("{in_memory}{in_msrs}"), "{pmu:?}");
    }
}

fn a_counted_handler_counts_itself_unless_the_interrupt_freezes_counters() {
    for &pmu in all() {
        let text = printed(pmu, "kernel");
        assert!(text.starts_with("pmi 5 interrupts, 5 overflows, "), "{pmu:?}: {text}");
        let least = text.split("value ").nth(1).and_then(|rest| rest.split("..").next());
        let least: u32 = least.and_then(|number| number.parse().ok()).expect("a number");
        assert!((1..1000).contains(&least), "{pmu:?}: {text}");
    }
    for pmu in INTEL {
        let text = printed(pmu, "frozen-kernel");
        assert!(text.contains("\npmi 5 interrupts, 5 overflows, "), "{pmu:?}: {text}");
        assert!(text.contains(", value 0..0, "), "{pmu:?}: {text}");
        assert!(text.ends_with(&global(intel::COUNTERS, 0)), "{pmu:?}: {text}");
    }
}

fn a_freeze_lasts_until_a_late_handler_runs() {
    for pmu in INTEL {
        let text = printed(pmu, "frozen-cli");
        let rest = ", value 0..0, status 01, left 01, entry 00000050, 1 late\n".to_owned()
            + &global(intel::COUNTERS, 0);
        assert!(text.ends_with(&rest), "{pmu:?}: {text}");
    }
}

fn a_freeze_shows_in_global_status_of_version_5_and_in_global_control_of_version_2() {
    for (pmu, control, status) in [(Pmu::Intel, intel::COUNTERS, 1 << 59 | 1), (Pmu::IntelV2, 0, 1)] {
        let text = writes(intel::DEBUG_CONTROL) + &none_delivered(MASKED_NMI) + &global(control, status);
        assert_eq!(printed(pmu, "frozen-masked"), text, "{pmu:?}");
    }
}

fn a_freeze_ends_by_clearing_status_in_version_5_and_by_writing_control_in_version_2() {
    let begin = writes(intel::DEBUG_CONTROL);
    assert_eq!(
        printed(Pmu::Intel, "frozen-once"),
        format!("{begin}{}{}", all_delivered(Pmu::Intel, 5, NMI), global(intel::COUNTERS, 0))
    );
    let one =
        "pmi 1 interrupts, 1 overflows, at 0..0, value 0..0, status 01, left 00, entry 00000400, 0 late\n";
    assert_eq!(printed(Pmu::IntelV2, "frozen-once"), format!("{begin}{one}{}", global(0, 0)));
}
