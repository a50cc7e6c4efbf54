//! Overflows: how many interrupts come, where the guest is then, and what its counters show.
//!
//! The loop in user mode has two instructions a round, of which the second is one byte behind the first, and its counters count
//! in user mode only. So nothing but the loop moves them, and an interrupt that comes directly behind the instruction that
//! overflowed finds a counter at zero.

use guest_tests::lab::Steps;
use guest_tests::suite::{Test, second_tier};
use guest_tests::tests;

use crate::pmu::registers::{intel, read, reads, write, writes};
use crate::pmu::{ALL, INTEL, LONG, Pmu, on_each, on_each_its_own, output, said};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    [
        tests![
            an_nmi_comes_directly_behind_the_instruction_that_overflowed,
            an_ordinary_interrupt_is_as_exact_as_an_nmi,
            with_interrupts_off_an_ordinary_one_waits_and_comes_once,
            a_masked_overflow_leaves_its_status_and_nothing_else,
            an_apic_that_is_off_delivers_nothing_then_or_later,
            counters_that_overflow_together_are_all_seen,
            a_fixed_counter_overflows_as_exactly_as_a_general_one,
            a_counter_that_asks_for_no_interrupt_gets_none,
            every_event_overflows_exactly,
            an_x2apic_delivers_likewise,
            every_processor_gets_its_own_interrupts,
            an_interrupt_of_intels_masks_its_entry_in_an_x2apic_but_not_in_an_xapic,
            a_handler_that_is_counted_finds_its_own_instructions_unless_the_interrupt_froze_the_counter,
            a_freeze_lasts_until_the_handler_looks_however_late,
            a_freeze_is_in_the_status_of_version_5_and_in_the_control_of_version_2,
            a_freeze_is_over_when_version_5s_status_is_cleared_and_when_version_2s_control_is_written,
        ],
        second_tier(tests![a_hundred_thousand_overflows_are_a_hundred_thousand_interrupts,]),
    ]
    .concat()
}

/// Name and words. PMUs of the same kind do the same, whoever made them.
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

/// Name, and what selects it on AMD's and on Intel's.
const EVENTS: [(&str, u32, u32); 2] = [("branches", 0x51_00c2, 0x51_00c4), ("cycles", 0x51_0076, 0x51_003c)];

/// Fixed counters: name and number.
const FIXED: [(&str, u32); 2] = [("fixed-instructions", 4), ("fixed-cycles", 5)];

/// What guests do whose overflows freeze all counters. They end with what global control and status are then.
const FROZEN: [(&str, &str); 4] = [
    ("frozen-kernel", "pmi=nmi,5,10000,1,0:0x5300c0"),
    ("frozen-cli", "pmi=cli,5,10000"),
    ("frozen-masked", "pmi=masked,5,10000"),
    ("frozen-once", "pmi=once,5,10000"),
];

pub fn guests(steps: Steps) -> Steps {
    let steps = GUESTS.iter().fold(steps, |steps, (name, words)| on_each(steps, &ALL, name, words));
    let steps = EVENTS.iter().fold(steps, |steps, (name, amd, intel)| {
        on_each_its_own(steps, &ALL, name, |pmu| {
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

/// The bits of global status, where there is such a register.
fn status(pmu: Pmu, bits: u32) -> String {
    let bits = if pmu == Pmu::V2 || pmu.is_intel() { bits } else { 0 };
    format!("{bits:02x}")
}

/// What a guest prints all of whose overflows arrived as they should.
fn exactly(pmu: Pmu, overflows: u32, entry: u32) -> String {
    let status = status(pmu, 1);
    format!(
        "pmi {overflows} interrupts, {overflows} overflows, at 0..0, value 0..0, status {status}, left 00, \
         entry {entry:08x}, 0 late\n"
    )
}

/// What a guest prints whose overflow nobody heard of.
fn nothing(entry: u32) -> String {
    format!("pmi 0 interrupts, 0 overflows, at -, value -, status 00, left 01, entry {entry:08x}, 0 late\n")
}

/// What a guest with Intel's PMU prints that reads global control and status.
fn global(control: u64, status: u64) -> String {
    reads(intel::GLOBAL_CONTROL, control) + &reads(intel::GLOBAL_STATUS, status)
}

const NMI: u32 = 0x400;
const FIXED_VECTOR: u32 = 0x50;
const MASKED_NMI: u32 = 0x10400;

fn an_nmi_comes_directly_behind_the_instruction_that_overflowed() {
    for pmu in ALL {
        assert_eq!(said(pmu, "nmi"), exactly(pmu, 5, NMI), "{pmu:?}");
        assert_eq!(said(pmu, "short"), exactly(pmu, 100, NMI), "{pmu:?}");
        // Of an odd period, every second one is between the two instructions of the loop.
        assert_eq!(said(pmu, "odd"), exactly(pmu, 5, NMI).replace("at 0..0", "at 0..1"), "{pmu:?}");
    }
}

fn a_hundred_thousand_overflows_are_a_hundred_thousand_interrupts() {
    assert_eq!(output(LONG.of("hundred-thousand")), exactly(Pmu::V2, 100_000, NMI));
}

fn an_ordinary_interrupt_is_as_exact_as_an_nmi() {
    for pmu in ALL {
        assert_eq!(said(pmu, "fixed"), exactly(pmu, 5, FIXED_VECTOR), "{pmu:?}");
    }
}

fn with_interrupts_off_an_ordinary_one_waits_and_comes_once() {
    for pmu in ALL {
        let text = said(pmu, "cli");
        assert!(text.starts_with("pmi 0 interrupts, 1 overflows, "), "{pmu:?}: {text}");
        // Of the 50003 counts of the loop, 10000 were before the overflow.
        let rest =
            format!("value 40003..40003, status {}, left 01, entry 00000050, 1 late\n", status(pmu, 1));
        assert!(text.ends_with(&rest), "{pmu:?}: {text}");
    }
}

fn a_masked_overflow_leaves_its_status_and_nothing_else() {
    for pmu in ALL {
        assert_eq!(said(pmu, "masked"), nothing(MASKED_NMI), "{pmu:?}");
    }
}

fn an_apic_that_is_off_delivers_nothing_then_or_later() {
    for pmu in ALL {
        assert_eq!(said(pmu, "svr-off"), nothing(MASKED_NMI), "switched off, it masks its entries: {pmu:?}");
        assert_eq!(said(pmu, "apic-off"), nothing(NMI), "{pmu:?}");
        let again = nothing(MASKED_NMI) + &nothing(MASKED_NMI) + &nothing(NMI) + &exactly(pmu, 5, NMI);
        assert_eq!(said(pmu, "again"), again, "and then it delivers again: {pmu:?}");
    }
}

fn counters_that_overflow_together_are_all_seen() {
    for pmu in ALL {
        for (name, counters) in [("two", 2), ("four", 4), ("all", pmu.counters() + pmu.fixed_counters())] {
            let one = exactly(pmu, 5, NMI);
            let all = one
                .replace("5 overflows", &format!("{} overflows", 5 * counters))
                .replace("status 01", &format!("status {:02x}", (1 << counters) - 1));
            assert_eq!(said(pmu, name), all, "{pmu:?}");
        }
    }
}

fn a_fixed_counter_overflows_as_exactly_as_a_general_one() {
    for pmu in INTEL {
        for (name, counter) in FIXED {
            let one = exactly(pmu, 5, NMI);
            let all = one.clone() + &one.replace("at 0..0", "at 0..1") + &exactly(pmu, 5, FIXED_VECTOR);
            let all = all.replace("status 01", &format!("status {:02x}", 1 << counter));
            assert_eq!(said(pmu, name), all, "{pmu:?}");
        }
    }
}

fn a_counter_that_asks_for_no_interrupt_gets_none() {
    for pmu in ALL {
        assert_eq!(said(pmu, "silent"), nothing(NMI), "{pmu:?}");
    }
}

fn every_event_overflows_exactly() {
    for pmu in ALL {
        assert_eq!(said(pmu, "cycles"), exactly(pmu, 5, NMI), "{pmu:?}");
        // Half of the loop's instructions are branches.
        assert_eq!(said(pmu, "branches"), exactly(pmu, 2, NMI), "{pmu:?}");
    }
}

fn an_x2apic_delivers_likewise() {
    for pmu in ALL {
        let all = exactly(pmu, 5, NMI)
            + &exactly(pmu, 5, FIXED_VECTOR)
            + &nothing(MASKED_NMI)
            + &nothing(MASKED_NMI);
        assert_eq!(said(pmu, "x2apic"), all, "{pmu:?}");
    }
}

fn every_processor_gets_its_own_interrupts() {
    for pmu in ALL {
        let (nmi, fixed) = (exactly(pmu, 50, NMI), exactly(pmu, 50, FIXED_VECTOR));
        assert_eq!(said(pmu, "processors"), format!("processors 2\n{nmi}{nmi}{fixed}{fixed}"), "{pmu:?}");
    }
}

/// A handler that does not open the entry again, as it must on Intel's. Tally closes it where it can do so without undoing
/// what else happens to the APIC: where the entry is an MSR.
fn an_interrupt_of_intels_masks_its_entry_in_an_x2apic_but_not_in_an_xapic() {
    for pmu in ALL {
        let in_memory = exactly(pmu, 5, NMI);
        let in_msrs = if pmu.is_intel() {
            "pmi 1 interrupts, 1 overflows, at 0..0, value 0..0, status 01, left 01, entry 00010400, 0 late\n"
        } else {
            &in_memory
        };
        assert_eq!(said(pmu, "once"), format!("{in_memory}{in_msrs}"), "{pmu:?}");
    }
}

fn a_handler_that_is_counted_finds_its_own_instructions_unless_the_interrupt_froze_the_counter() {
    for pmu in ALL {
        let text = said(pmu, "kernel");
        assert!(text.starts_with("pmi 5 interrupts, 5 overflows, "), "{pmu:?}: {text}");
        let least = text.split("value ").nth(1).and_then(|rest| rest.split("..").next());
        let least: u32 = least.and_then(|number| number.parse().ok()).expect("a number");
        assert!((1..1000).contains(&least), "{pmu:?}: {text}");
    }
    for pmu in INTEL {
        let text = said(pmu, "frozen-kernel");
        assert!(text.contains("\npmi 5 interrupts, 5 overflows, "), "{pmu:?}: {text}");
        assert!(text.contains(", value 0..0, "), "{pmu:?}: {text}");
        assert!(text.ends_with(&global(intel::COUNTERS, 0)), "{pmu:?}: {text}");
    }
}

fn a_freeze_lasts_until_the_handler_looks_however_late() {
    for pmu in INTEL {
        let text = said(pmu, "frozen-cli");
        let rest = ", value 0..0, status 01, left 01, entry 00000050, 1 late\n".to_owned()
            + &global(intel::COUNTERS, 0);
        assert!(text.ends_with(&rest), "{pmu:?}: {text}");
    }
}

fn a_freeze_is_in_the_status_of_version_5_and_in_the_control_of_version_2() {
    for (pmu, control, status) in [(Pmu::Intel, intel::COUNTERS, 1 << 59 | 1), (Pmu::IntelV2, 0, 1)] {
        let text = writes(intel::DEBUG_CONTROL) + &nothing(MASKED_NMI) + &global(control, status);
        assert_eq!(said(pmu, "frozen-masked"), text, "{pmu:?}");
    }
}

fn a_freeze_is_over_when_version_5s_status_is_cleared_and_when_version_2s_control_is_written() {
    let begin = writes(intel::DEBUG_CONTROL);
    assert_eq!(
        said(Pmu::Intel, "frozen-once"),
        format!("{begin}{}{}", exactly(Pmu::Intel, 5, NMI), global(intel::COUNTERS, 0))
    );
    let one =
        "pmi 1 interrupts, 1 overflows, at 0..0, value 0..0, status 01, left 00, entry 00000400, 0 late\n";
    assert_eq!(said(Pmu::IntelV2, "frozen-once"), format!("{begin}{one}{}", global(0, 0)));
}
