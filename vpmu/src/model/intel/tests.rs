//! The model as a guest sees it, by its registers. The behaviour that all PMUs share is tested with AMD's model.

mod reference;

use proptest::prelude::*;

use super::{FROZEN, Intel, Shape, Version};
use crate::Outcome::{Fault, Handled, NotHandled, Value};
use crate::model::Model;
use crate::model::testing::run;
use crate::source::Source;
use crate::source::script::Script;
use crate::x86::{DEBUGCTL, FREEZE_PERFMON_ON_PMI, Leaf, Vendor};

const COUNTER: u32 = 0xc1;
const SELECT: u32 = 0x186;
const FIXED: u32 = 0x309;
const CAPABILITIES: u32 = 0x345;
const FIXED_CONTROL: u32 = 0x38d;
const STATUS: u32 = 0x38e;
const CONTROL: u32 = 0x38f;
const STATUS_CLEAR: u32 = 0x390;
const STATUS_SET: u32 = 0x391;
const IN_USE: u32 = 0x392;
const ALIAS: u32 = 0x4c1;
const RDPMC_FIXED: u32 = 1 << 30;

/// Instructions, user and kernel, enabled; with and without an interrupt.
const COUNTING: u64 = 0x43_00c0;
const SAMPLING: u64 = 0x53_00c0;
const MASK: u64 = (1 << 48) - 1;
/// The bits of four general counters and three fixed ones in the global registers.
const ALL: u64 = 7 << 32 | 0xf;

const fn shape(version: Version) -> Shape {
    Shape { version, general: 4, fixed: 3, absent: 0x18 }
}

fn pmu(version: Version) -> (Intel<Script>, Script) {
    let host = Script::default();
    (Intel::new(shape(version), Vendor::Intel, host.clone()), host)
}

#[test]
fn cpuid_announces_each_version() {
    let announced = |version, function| {
        let mut leaf = Leaf::default();
        shape(version).show(function, &mut leaf);
        leaf
    };
    let v2 = Leaf { eax: 0x0730_0402, ebx: 0x18, ecx: 0, edx: 0x0603 };
    assert_eq!(announced(Version::V2, 0xa), v2);
    let v5 = Leaf { eax: 0x0730_0405, ebx: 0x18, ecx: 7, edx: 0x8603 };
    assert_eq!(announced(Version::V5, 0xa), v5);
    assert_eq!((announced(Version::V2, 1).ecx, announced(Version::V5, 1).ecx), (0, 1 << 15));
    assert_eq!(announced(Version::V5, 0x8000_0001), Leaf::default());
}

#[test]
fn after_reset_global_control_enables_the_general_counters() {
    let (mut pmu, _) = pmu(Version::V5);
    assert_eq!(pmu.read(CONTROL), Value(0xf));
    assert_eq!(pmu.write(CONTROL, ALL), Handled);
    assert_eq!(pmu.read(CONTROL), Value(ALL));
}

#[test]
fn every_version_has_its_registers_and_no_others() {
    for (version, newer) in [(Version::V2, false), (Version::V5, true)] {
        let (mut pmu, _) = pmu(version);
        let mut has = |msr| match pmu.read(msr) {
            Value(_) => true,
            Fault => false,
            other => panic!("{msr:#x}: {other:?}"),
        };
        for counter in 0..8 {
            for base in [0, COUNTER, SELECT] {
                assert_eq!(has(base + counter), counter < 4, "{base:#x} + {counter}");
            }
            assert_eq!(has(ALIAS + counter), counter < 4 && newer);
        }
        for counter in 0..4 {
            for base in [FIXED, RDPMC_FIXED] {
                assert_eq!(has(base + counter), counter < 3, "{base:#x} + {counter}");
            }
        }
        for msr in [FIXED_CONTROL, STATUS, CONTROL, STATUS_CLEAR, DEBUGCTL] {
            assert!(has(msr), "{msr:#x}");
        }
        for msr in [STATUS_SET, IN_USE, CAPABILITIES] {
            assert_eq!(has(msr), newer, "{msr:#x}");
        }
        for absent in [0x1a6, 0x329, 0x3f1, 0x600, 0x1900, 0xc001_0200, 1 << 31, 3 << 30] {
            assert!(!has(absent), "{absent:#x}");
        }
        assert_eq!(pmu.read(0x10), NotHandled);
    }
}

#[test]
fn reserved_bits_fault_and_change_nothing() {
    for (version, msr, value) in [
        (Version::V5, SELECT, 1 << 21),
        (Version::V5, SELECT, 1 << 32),
        (Version::V5, ALIAS, 1 << 48),
        (Version::V5, FIXED_CONTROL, 1 << 2),
        (Version::V5, FIXED_CONTROL, 1 << 12),
        (Version::V5, CONTROL, 1 << 4),
        (Version::V5, CONTROL, 1 << 35),
        (Version::V5, STATUS, 0),
        (Version::V5, STATUS_SET, 1 << 62),
        (Version::V5, STATUS_CLEAR, 1 << 58),
        (Version::V2, STATUS_CLEAR, FROZEN),
        (Version::V5, IN_USE, 0),
        (Version::V5, CAPABILITIES, 0),
    ] {
        let (mut pmu, _) = pmu(version);
        let before = pmu.read(msr);
        assert_eq!(pmu.write(msr, value), Fault, "{msr:#x} {value:#x}");
        assert_eq!(pmu.read(msr), before, "{msr:#x} {value:#x}");
    }
    for version in [Version::V2, Version::V5] {
        assert_eq!(
            pmu(version).0.write(STATUS_CLEAR, 3 << 62 | ALL),
            Handled,
            "bits that are never set may be cleared"
        );
    }
}

#[test]
fn a_write_of_32_bits_is_sign_extended() {
    let (mut pmu, _) = pmu(Version::V5);
    for (written, value) in
        [(0x8000_0000, MASK - 0x7fff_ffff), (0x7fff_ffff, 0x7fff_ffff), (0x5_0000_0001, 1)]
    {
        pmu.write(COUNTER, written);
        assert_eq!(pmu.read(COUNTER), Value(value));
        assert_eq!((pmu.read(ALIAS), pmu.read(0)), (Value(value), Value(value)));
    }
    pmu.write(ALIAS + 3, 0x5_0000_0001);
    assert_eq!((pmu.read(COUNTER + 3), pmu.read(3)), (Value(0x5_0000_0001), Value(0x5_0000_0001)));
}

#[test]
fn fixed_counters_count_only_while_they_are_enabled() {
    let (mut pmu, host) = pmu(Version::V2);
    pmu.write(CONTROL, ALL);
    pmu.write(FIXED_CONTROL, 0x0321);
    run(&mut pmu, &host, 1000);
    for counter in 0..3 {
        assert_eq!(pmu.read(FIXED + counter), Value(1000));
        assert_eq!(pmu.read(RDPMC_FIXED + counter), Value(1000));
    }
    pmu.write(FIXED_CONTROL, 0x0300);
    run(&mut pmu, &host, 500);
    let shown = [0, 1, 2].map(|counter| pmu.read(FIXED + counter));
    assert_eq!(shown, [Value(1000), Value(1000), Value(1500)]);
}

#[test]
fn switching_a_fixed_counter_off_and_on_needs_no_request_to_the_host() {
    let (mut pmu, host) = pmu(Version::V5);
    pmu.write(CONTROL, ALL);
    pmu.write(FIXED_CONTROL, 0x2);
    let before = host.requests();
    for _ in 0..100 {
        run(&mut pmu, &host, 5);
        pmu.write(FIXED_CONTROL, 0);
        run(&mut pmu, &host, 100);
        pmu.write(FIXED_CONTROL, 0x2);
    }
    assert_eq!((pmu.read(FIXED), host.requests()), (Value(500), before));
}

#[test]
fn a_fixed_counter_interrupts_at_the_exact_count() {
    let (mut pmu, host) = pmu(Version::V5);
    pmu.write(CONTROL, ALL);
    pmu.write(FIXED + 1, MASK + 1 - 700);
    pmu.write(FIXED_CONTROL, 0xb0);
    assert_eq!(run(&mut pmu, &host, 10_000), [700]);
    assert_eq!(pmu.read(STATUS), Value(1 << 33));
    pmu.write(STATUS_CLEAR, 1 << 33);
    assert_eq!(pmu.read(STATUS), Value(0));
}

/// Returns a PMU that has frozen at the overflow of a counter, after 100 counts. Another counter only counts.
fn frozen(version: Version) -> (Intel<Script>, Script) {
    let (mut pmu, host) = pmu(version);
    assert_eq!(pmu.write(DEBUGCTL, FREEZE_PERFMON_ON_PMI), Handled);
    pmu.write(CONTROL, ALL);
    pmu.write(COUNTER, 100_u64.wrapping_neg());
    pmu.write(SELECT, SAMPLING);
    pmu.write(FIXED_CONTROL, 0x3);
    assert_eq!(run(&mut pmu, &host, 1000), [100]);
    assert_eq!((pmu.read(COUNTER), pmu.read(FIXED)), (Value(0), Value(100)), "both stand still");
    (pmu, host)
}

#[test]
fn a_freeze_of_version_2_clears_global_control() {
    let (mut pmu, host) = frozen(Version::V2);
    assert_eq!((pmu.read(CONTROL), pmu.read(STATUS)), (Value(0), Value(1)));
    pmu.write(STATUS_CLEAR, 1);
    run(&mut pmu, &host, 1000);
    assert_eq!(pmu.read(FIXED), Value(100));
    pmu.write(CONTROL, 1 << 32);
    run(&mut pmu, &host, 50);
    assert_eq!((pmu.read(CONTROL), pmu.read(FIXED)), (Value(1 << 32), Value(150)));
    assert_eq!(pmu.read(COUNTER), Value(0), "it was not switched on again");
}

#[test]
fn a_freeze_of_version_5_lasts_until_its_bit_is_cleared() {
    let (mut pmu, host) = frozen(Version::V5);
    assert_eq!((pmu.read(CONTROL), pmu.read(STATUS)), (Value(ALL), Value(FROZEN | 1)));
    pmu.write(STATUS_CLEAR, 1);
    pmu.write(CONTROL, ALL);
    run(&mut pmu, &host, 1000);
    assert_eq!(pmu.read(FIXED), Value(100));
    pmu.write(STATUS_CLEAR, FROZEN);
    run(&mut pmu, &host, 50);
    assert_eq!((pmu.read(FIXED), pmu.read(STATUS)), (Value(150), Value(0)));
}

#[test]
fn without_the_freeze_counters_go_on() {
    let (mut pmu, host) = pmu(Version::V5);
    pmu.write(COUNTER, 100_u64.wrapping_neg());
    pmu.write(SELECT, SAMPLING);
    run(&mut pmu, &host, 1000);
    assert_eq!((pmu.read(COUNTER), pmu.read(STATUS)), (Value(900), Value(1)));
}

#[test]
fn status_bits_that_software_sets_do_not_interrupt() {
    let (mut pmu, host) = pmu(Version::V5);
    pmu.write(SELECT, COUNTING);
    assert_eq!(pmu.write(STATUS_SET, ALL | FROZEN), Handled);
    assert_eq!(pmu.read(STATUS), Value(ALL | FROZEN));
    assert!(!pmu.unit().take_interrupt());
    run(&mut pmu, &host, 100);
    assert_eq!(pmu.read(COUNTER), Value(0), "frozen");
}

#[test]
fn the_in_use_register_shows_configured_counters_and_interrupts() {
    let (mut pmu, _) = pmu(Version::V5);
    assert_eq!(pmu.read(IN_USE), Value(0));
    pmu.write(SELECT + 2, COUNTING);
    pmu.write(FIXED_CONTROL, 0x20);
    assert_eq!(pmu.read(IN_USE), Value(1 << 33 | 1 << 2));
    pmu.write(SELECT + 2, SAMPLING);
    pmu.write(FIXED_CONTROL, 0x28);
    assert_eq!(
        pmu.read(IN_USE),
        Value(1 << 63 | 1 << 33 | 1 << 2),
        "an interrupt bit alone does not put a counter in use"
    );
}

#[test]
fn an_event_that_the_host_lacks_stands_still_and_the_operator_is_told_its_name() {
    let host = Script::default();
    let mut pmu = Intel::new(shape(Version::V5), Vendor::Amd, host.clone());
    pmu.write(SELECT, 0x43_412e);
    pmu.write(SELECT + 1, 0x43_00c4);
    run(&mut pmu, &host, 100);
    assert_eq!((pmu.read(COUNTER), pmu.read(COUNTER + 1)), (Value(0), Value(100)));
    let notices = pmu.unit().bank.take_notices();
    assert_eq!(notices.len(), 1);
    assert!(notices[0].to_string().contains("LLC misses"), "{}", notices[0]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn no_sequence_of_accesses_panics_or_takes_too_many_counters(
        steps in proptest::collection::vec(
            (any::<bool>(), prop_oneof![reference::register(), any::<u32>()], any::<u64>()), 1..100),
        version in prop_oneof![Just(Version::V2), Just(Version::V5)],
        general in 1_usize..=8,
        fixed in 0_usize..=3,
    ) {
        let host = Script::default();
        let shape = Shape { version, general, fixed, absent: 0 };
        let mut pmu = Intel::new(shape, Vendor::Intel, host.clone());
        for (write, msr, value) in steps {
            let outcome = if write { pmu.write(msr, value) } else { pmu.read(msr) };
            let is_its = crate::x86::is_pmu_msr(msr) || crate::x86::is_rdpmc(msr) || msr == DEBUGCTL;
            prop_assert_eq!(outcome == NotHandled, !is_its);
            host.guest_runs(value >> 16, |_| pmu.unit().alarm(false));
            prop_assert!(host.counters() <= general + fixed);
        }
    }
}
