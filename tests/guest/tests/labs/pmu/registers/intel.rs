//! Intel's architectural registers (SDM volume 3, section 20.2), of version 5 and of version 2.

use guest_tests::lab::Steps;
use guest_tests::suite::Test;
use guest_tests::tests;

use super::{faults, leaves, read, reads, registers, write, writes};
use crate::pmu::{INTEL, Pmu, on_each, on_each_its_own, said};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    tests![
        cpuid_tells_of_the_vendor_and_of_the_counters,
        a_general_counter_takes_32_bits_and_extends_their_sign,
        all_of_a_general_counter_is_written_at_another_address,
        a_write_of_a_reserved_bit_faults_and_changes_nothing,
        debug_control_keeps_whether_interrupts_freeze,
        fixed_counters_are_written_whole,
        global_control_has_the_general_counters_on_at_reset_and_the_fixed_ones_off,
        global_status_is_cleared_bit_by_bit_and_never_written,
        version_5_can_set_the_status_and_freeze_all_counters_by_it,
        version_5_says_which_counters_are_in_use,
    ]
}

/// The first fixed counter.
pub const FIXED: u32 = 0x309;
/// In RDPMC's numbers.
pub const RDPMC_FIXED: u32 = 0x4000_0000;
pub const DEBUG_CONTROL: u32 = 0x1d9;
/// In debug control: an overflow that interrupts stops all counters.
pub const FREEZE: u64 = 1 << 12;
pub const GLOBAL_STATUS: u32 = 0x38e;
pub const GLOBAL_CONTROL: u32 = 0x38f;
/// All counters in the global registers, the fixed ones from bit 32 on.
pub const COUNTERS: u64 = GENERAL | 0b11 << 32;

const GENERAL: u64 = 0b1111;
const CAPABILITIES: u32 = 0x345;
const FIXED_CONTROL: u32 = 0x38d;
const STATUS_CLEAR: u32 = 0x390;
const STATUS_SET: u32 = 0x391;
const IN_USE: u32 = 0x392;
/// In global status: all counters stand still.
const FROZEN: u64 = 1 << 59;
/// There: what is always clear, and may be cleared.
const DEBUG_STORE_AND_CHANGED: u64 = 0b11 << 62;

/// The event select and the counter of that number.
pub fn general(counter: u32) -> (u32, u32) {
    (0x186 + counter, 0xc1 + counter)
}

/// The address of the same counter at which all of it is written.
fn whole(counter: u32) -> u32 {
    0x4c1 + counter
}

/// Counters and selects beyond the last, sampling by the processor itself, and AMD's registers.
pub const ABSENT: [u32; 16] = [
    0xc5,
    0xc8,
    0x18a,
    0x18d,
    0x30b,
    0x30c,
    0x3f1,
    0x4c5,
    0xc000_0300,
    0xc000_0301,
    0xc001_0000,
    0xc001_0007,
    0xc001_0200,
    0xc001_020b,
    0xc001_0230,
    0xc001_0240,
];

/// Of an event select, everything but the bit that switches on, and the reserved ones: 21 and 32 to 63.
const SELECT: u64 = 0xff9f_ffff;
/// Of fixed control, all there is for two counters: both modes and the interrupt.
const FIXED_SELECT: u64 = 0xbb;

/// Writes of values that are kept, and that are not.
struct Reserved {
    register: u32,
    kept: u64,
    faulting: &'static [u64],
}

const RESERVED: [Reserved; 3] = [
    Reserved { register: 0x186, kept: SELECT, faulting: &[1 << 21, 1 << 32, 1 << 63, u64::MAX] },
    Reserved { register: FIXED_CONTROL, kept: FIXED_SELECT, faulting: &[1 << 2, 1 << 6, 1 << 8, 1 << 63] },
    Reserved { register: GLOBAL_CONTROL, kept: COUNTERS, faulting: &[1 << 4, 1 << 31, 1 << 34, 1 << 63] },
];

pub fn guests(steps: Steps) -> Steps {
    let steps = on_each(steps, &INTEL, "cpuid", "cpuid=0,0 cpuid=1,0 cpuid=0xa,0");
    let steps = on_each_its_own(steps, &INTEL, "halves", |pmu| {
        let half = |(_, counter)| {
            write(counter, 0x1234_8000_0001) + &read(counter) + &write(counter, 1 << 32 | 7) + &read(counter)
        };
        registers(pmu).map(half).collect()
    });
    let capabilities = read(CAPABILITIES) + &write(CAPABILITIES, 1 << 13);
    let wholes = (0..4).map(|counter| {
        let (_, half) = general(counter);
        write(whole(counter), 1 << 47 | 5)
            + &read(half)
            + &write(whole(counter), 1 << 48)
            + &write(half, 9)
            + &read(whole(counter))
    });
    let steps = on_each(steps, &INTEL, "wholes", &(capabilities + &wholes.collect::<String>()));
    let reserved = RESERVED.iter().map(|case| {
        let faulting: String = case.faulting.iter().map(|value| write(case.register, *value)).collect();
        write(case.register, case.kept) + &faulting + &read(case.register) + &write(case.register, 0)
    });
    let steps = on_each(steps, &INTEL, "reserved", &reserved.collect::<String>());
    let debug =
        write(DEBUG_CONTROL, FREEZE) + &read(DEBUG_CONTROL) + &write(DEBUG_CONTROL, 0) + &read(DEBUG_CONTROL);
    let steps = on_each(steps, &INTEL, "debug-control", &debug);
    let fixed = (FIXED..FIXED + 2)
        .map(|counter| read(counter) + &write(counter, (1 << 48) - 2) + &read(counter))
        .collect::<String>();
    let steps = on_each(steps, &INTEL, "fixed-registers", &(read(FIXED_CONTROL) + &fixed));
    let count = |counter| format!("count-user=0:0x4100c0,1000,{counter} ");
    let control = read(GLOBAL_CONTROL)
        + &count(0)
        + &count(4)
        + &write(GLOBAL_CONTROL, 1 << 32)
        + &count(0)
        + &count(4)
        + &count(5);
    let steps = on_each(steps, &INTEL, "global-control", &control);
    with_status(steps)
}

fn with_status(steps: Steps) -> Steps {
    let overflow = "pmi=masked,1,10000,0x21 ";
    let status = overflow.to_owned()
        + &read(GLOBAL_STATUS)
        + &write(GLOBAL_STATUS, 0)
        + &write(STATUS_CLEAR, 1 << 4)
        + &write(STATUS_CLEAR, 1 << 34)
        + &write(STATUS_CLEAR, 1 | DEBUG_STORE_AND_CHANGED)
        + &read(GLOBAL_STATUS)
        + &read(STATUS_CLEAR)
        + &write(STATUS_CLEAR, 1 << 33)
        + &read(GLOBAL_STATUS);
    let steps = on_each(steps, &INTEL, "status", &status);
    let count = "count-user=0:0x4100c0,1000 ";
    let set = write(STATUS_SET, COUNTERS)
        + &write(STATUS_SET, 1 << 4)
        + &write(STATUS_SET, 1 << 62)
        + &read(GLOBAL_STATUS)
        + &read(STATUS_SET)
        + &write(STATUS_CLEAR, 1 << 32 | 0b101)
        + &write(STATUS_SET, FROZEN)
        + &read(GLOBAL_STATUS)
        + count
        + &write(STATUS_CLEAR, FROZEN)
        + &read(GLOBAL_STATUS)
        + count;
    let steps = on_each(steps, &INTEL, "status-set", &set);
    let in_use = read(IN_USE)
        + &IN_USES.map(|(register, value, _)| write(register, value) + &read(IN_USE)).concat()
        + &write(IN_USE, 0);
    on_each(steps, &INTEL, "in-use", &in_use)
}

/// Writes one after the other, and what is in use then. An interrupt is, however many ask for it, in bit 63.
const IN_USES: [(u32, u64, u64); 6] = [
    (0x187, 0xc0, 0b10),
    (0x187, 0x03_0000, 0),
    (0x186, 0x3c, 0b01),
    (FIXED_CONTROL, 0x20, 1 << 33 | 0b01),
    (FIXED_CONTROL, 0x88, 1 << 63 | 0b01),
    (0x186, 1 << 20, 1 << 63),
];

fn cpuid_tells_of_the_vendor_and_of_the_counters() {
    const CAPABILITIES: u32 = 1 << 15;
    // Three of the seven architectural events are not there: bus cycles and the last level's.
    for (pmu, capabilities, counters) in [
        (Pmu::Intel, CAPABILITIES, [0x0730_0405, 0b1_1100, 0b11, 0x8602]),
        (Pmu::IntelV2, 0, [0x0730_0402, 0b1_1100, 0, 0x602]),
    ] {
        let leaves = leaves(&said(pmu, "cpuid"));
        let [_, b, c, d] = leaves[0].map(u32::to_le_bytes);
        assert_eq!([b, d, c].concat(), b"GenuineIntel", "{pmu:?}");
        assert_eq!((leaves[1][2] & CAPABILITIES, leaves[2]), (capabilities, counters), "{pmu:?}");
    }
}

fn a_general_counter_takes_32_bits_and_extends_their_sign() {
    for pmu in INTEL {
        let half = |(_, counter)| {
            writes(counter) + &reads(counter, 0xffff_8000_0001) + &writes(counter) + &reads(counter, 7)
        };
        assert_eq!(said(pmu, "halves"), registers(pmu).map(half).collect::<String>(), "{pmu:?}");
    }
}

fn all_of_a_general_counter_is_written_at_another_address() {
    let capabilities = reads(CAPABILITIES, 1 << 13) + &faults("wrmsr", CAPABILITIES);
    let wholes = (0..4).map(|counter| {
        let (_, half) = general(counter);
        writes(whole(counter))
            + &reads(half, 1 << 47 | 5)
            + &faults("wrmsr", whole(counter))
            + &writes(half)
            + &reads(whole(counter), 9)
    });
    assert_eq!(said(Pmu::Intel, "wholes"), capabilities + &wholes.collect::<String>());
    let capabilities = faults("rdmsr", CAPABILITIES) + &faults("wrmsr", CAPABILITIES);
    let none = (0..4).map(|counter| {
        let (_, half) = general(counter);
        let fault = faults("wrmsr", whole(counter));
        fault.clone() + &reads(half, 0) + &fault + &writes(half) + &faults("rdmsr", whole(counter))
    });
    assert_eq!(said(Pmu::IntelV2, "wholes"), capabilities + &none.collect::<String>());
}

fn a_write_of_a_reserved_bit_faults_and_changes_nothing() {
    let written = RESERVED.iter().map(|case| {
        let faulting = faults("wrmsr", case.register).repeat(case.faulting.len());
        writes(case.register) + &faulting + &reads(case.register, case.kept) + &writes(case.register)
    });
    let written: String = written.collect();
    for pmu in INTEL {
        assert_eq!(said(pmu, "reserved"), written, "{pmu:?}");
    }
}

fn debug_control_keeps_whether_interrupts_freeze() {
    for pmu in INTEL {
        let (write, read) = (writes(DEBUG_CONTROL), |value| reads(DEBUG_CONTROL, value));
        assert_eq!(
            said(pmu, "debug-control"),
            format!("{write}{}{write}{}", read(FREEZE), read(0)),
            "{pmu:?}"
        );
    }
}

fn fixed_counters_are_written_whole() {
    let whole = |counter| reads(counter, 0) + &writes(counter) + &reads(counter, (1 << 48) - 2);
    for pmu in INTEL {
        let text = reads(FIXED_CONTROL, 0) + &whole(FIXED) + &whole(FIXED + 1);
        assert_eq!(said(pmu, "fixed-registers"), text, "{pmu:?}");
    }
}

fn global_control_has_the_general_counters_on_at_reset_and_the_fixed_ones_off() {
    let count = |value| format!("count 1000 {value:016x}\n");
    for pmu in INTEL {
        let text = reads(GLOBAL_CONTROL, GENERAL)
            + &count(2001)
            + &count(0)
            + &writes(GLOBAL_CONTROL)
            + &count(0)
            + &count(2001)
            + &count(0);
        assert_eq!(said(pmu, "global-control"), text, "{pmu:?}");
    }
}

fn global_status_is_cleared_bit_by_bit_and_never_written() {
    for pmu in INTEL {
        let text = said(pmu, "status");
        let (overflow, registers) = text.split_once('\n').expect("lines");
        assert!(overflow.contains(", left 21, "), "{pmu:?}: {text}");
        let wanted = reads(GLOBAL_STATUS, 1 << 33 | 1)
            + &faults("wrmsr", GLOBAL_STATUS)
            + &faults("wrmsr", STATUS_CLEAR).repeat(2)
            + &writes(STATUS_CLEAR)
            + &reads(GLOBAL_STATUS, 1 << 33)
            + &reads(STATUS_CLEAR, 0)
            + &writes(STATUS_CLEAR)
            + &reads(GLOBAL_STATUS, 0);
        assert_eq!(registers, wanted, "{pmu:?}");
    }
}

fn version_5_can_set_the_status_and_freeze_all_counters_by_it() {
    let count = |value| format!("count 1000 {value:016x}\n");
    let fault = faults("wrmsr", STATUS_SET);
    assert_eq!(
        said(Pmu::Intel, "status-set"),
        writes(STATUS_SET)
            + &fault.repeat(2)
            + &reads(GLOBAL_STATUS, COUNTERS)
            + &reads(STATUS_SET, 0)
            + &writes(STATUS_CLEAR)
            + &writes(STATUS_SET)
            + &reads(GLOBAL_STATUS, FROZEN | 1 << 33 | 0b1010)
            + &count(0)
            + &writes(STATUS_CLEAR)
            + &reads(GLOBAL_STATUS, 1 << 33 | 0b1010)
            + &count(2001)
    );
    assert_eq!(
        said(Pmu::IntelV2, "status-set"),
        fault.repeat(3)
            + &reads(GLOBAL_STATUS, 0)
            + &faults("rdmsr", STATUS_SET)
            + &writes(STATUS_CLEAR)
            + &fault
            + &reads(GLOBAL_STATUS, 0)
            + &count(2001)
            + &faults("wrmsr", STATUS_CLEAR)
            + &reads(GLOBAL_STATUS, 0)
            + &count(2001)
    );
}

fn version_5_says_which_counters_are_in_use() {
    let told = |(register, _, in_use)| writes(register) + &reads(IN_USE, in_use);
    let text = reads(IN_USE, 0) + &IN_USES.map(told).concat() + &faults("wrmsr", IN_USE);
    assert_eq!(said(Pmu::Intel, "in-use"), text);
    let silent = |(register, _, _)| writes(register) + &faults("rdmsr", IN_USE);
    let text = faults("rdmsr", IN_USE) + &IN_USES.map(silent).concat() + &faults("wrmsr", IN_USE);
    assert_eq!(said(Pmu::IntelV2, "in-use"), text);
}
