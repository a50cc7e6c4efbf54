//! Overflows: how many interrupts come, where the guest is then, and what its counters show.
//!
//! The loop in user mode has two instructions a round, of which the second is one byte behind the first, and its counters count
//! in user mode only. So nothing but the loop moves them, and an interrupt that comes directly behind the instruction that
//! overflowed finds a counter at zero.

use guest_tests::lab::Steps;

use crate::{ALL, LONG, Pmu, group, on_each, output, said};

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
    ("two", "pmi=nmi,5,10000,0x3"),
    ("four", "pmi=nmi,5,10000,0xf"),
    ("silent", "pmi=nmi,5,10000,1,0:0x4100c0"),
    ("branches", "pmi=nmi,5,10000,1,0:0x5100c2"),
    ("cycles", "pmi=nmi,5,10000,1,0:0x510076"),
    ("kernel", "pmi=nmi,5,10000,1,0:0x5300c0"),
    ("x2apic", "x2apic pmi=nmi,5,10000 pmi=fixed,5,10000 pmi=masked,5,10000 pmi=svr-off,5,10000"),
    ("processors", "smp=2 pmi=nmi,50,10000 x2apic pmi=fixed,50,10000"),
];

pub fn guests(steps: Steps) -> Steps {
    GUESTS.iter().fold(steps, |steps, (name, words)| on_each(steps, &ALL, name, words))
}

pub fn long_guests(steps: Steps) -> Steps {
    steps.bare_metal("hundred-thousand", Pmu::V2.options(), "pmi=nmi,100000,10000")
}

/// The bits of global status, where there is such a register.
fn status(pmu: Pmu, bits: u32) -> String {
    let bits = if pmu == Pmu::V2 { bits } else { 0 };
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

const NMI: u32 = 0x400;
const FIXED: u32 = 0x50;
const MASKED_NMI: u32 = 0x10400;

#[test]
fn an_nmi_comes_directly_behind_the_instruction_that_overflowed() {
    for pmu in ALL {
        assert_eq!(said(pmu, "nmi"), exactly(pmu, 5, NMI), "{pmu:?}");
        assert_eq!(said(pmu, "short"), exactly(pmu, 100, NMI), "{pmu:?}");
        // Of an odd period, every second one is between the two instructions of the loop.
        assert_eq!(said(pmu, "odd"), exactly(pmu, 5, NMI).replace("at 0..0", "at 0..1"), "{pmu:?}");
    }
}

#[test]
fn a_hundred_thousand_overflows_are_a_hundred_thousand_interrupts() {
    assert_eq!(output(group(&LONG).of("hundred-thousand")), exactly(Pmu::V2, 100_000, NMI));
}

#[test]
fn an_ordinary_interrupt_is_as_exact_as_an_nmi() {
    for pmu in ALL {
        assert_eq!(said(pmu, "fixed"), exactly(pmu, 5, FIXED), "{pmu:?}");
    }
}

#[test]
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

#[test]
fn a_masked_overflow_leaves_its_status_and_nothing_else() {
    for pmu in ALL {
        assert_eq!(said(pmu, "masked"), nothing(MASKED_NMI), "{pmu:?}");
    }
}

#[test]
fn an_apic_that_is_off_delivers_nothing_then_or_later() {
    for pmu in ALL {
        assert_eq!(said(pmu, "svr-off"), nothing(MASKED_NMI), "switched off, it masks its entries: {pmu:?}");
        assert_eq!(said(pmu, "apic-off"), nothing(NMI), "{pmu:?}");
        let again = nothing(MASKED_NMI) + &nothing(MASKED_NMI) + &nothing(NMI) + &exactly(pmu, 5, NMI);
        assert_eq!(said(pmu, "again"), again, "and then it delivers again: {pmu:?}");
    }
}

#[test]
fn counters_that_overflow_together_are_all_seen() {
    for (name, counters) in [("two", 2), ("four", 4)] {
        for pmu in ALL {
            let one = exactly(pmu, 5, NMI);
            let all = one
                .replace("5 overflows", &format!("{} overflows", 5 * counters))
                .replace("status 01", &format!("status {:02x}", (1 << counters) - 1));
            assert_eq!(said(pmu, name), all, "{pmu:?}");
        }
    }
}

#[test]
fn a_counter_that_asks_for_no_interrupt_gets_none() {
    for pmu in ALL {
        assert_eq!(said(pmu, "silent"), nothing(NMI), "{pmu:?}");
    }
}

#[test]
fn every_event_overflows_exactly() {
    for pmu in ALL {
        assert_eq!(said(pmu, "cycles"), exactly(pmu, 5, NMI), "{pmu:?}");
        // Half of the loop's instructions are branches.
        assert_eq!(said(pmu, "branches"), exactly(pmu, 2, NMI), "{pmu:?}");
    }
}

#[test]
fn an_x2apic_delivers_likewise() {
    for pmu in ALL {
        let all =
            exactly(pmu, 5, NMI) + &exactly(pmu, 5, FIXED) + &nothing(MASKED_NMI) + &nothing(MASKED_NMI);
        assert_eq!(said(pmu, "x2apic"), all, "{pmu:?}");
    }
}

#[test]
fn every_processor_gets_its_own_interrupts() {
    for pmu in ALL {
        let (nmi, fixed) = (exactly(pmu, 50, NMI), exactly(pmu, 50, FIXED));
        assert_eq!(said(pmu, "processors"), format!("processors 2\n{nmi}{nmi}{fixed}{fixed}"), "{pmu:?}");
    }
}
