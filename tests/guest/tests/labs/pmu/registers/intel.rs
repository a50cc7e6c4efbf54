//! Tests of Intel's architectural registers (SDM volume 3, section 20.2), of version 5 and of version 2.

use guest_tests::host::{self, Host};
use guest_tests::lab::Steps;
use guest_tests::suite::Test;
use guest_tests::tests;

use super::{faults, leaves, read, reads, registers, write, writes};
use crate::pmu::{INTEL, Pmu, on_each, on_each_with, printed};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    tests![
        cpuid_reports_the_vendor_and_the_counters,
        a_write_to_a_general_counter_sign_extends_32_bits,
        full_width_writes_have_addresses_of_their_own,
        writes_of_reserved_bits_fault_and_change_nothing,
        debug_control_stores_the_freeze_bit,
        fixed_counters_are_written_at_full_width,
        at_reset_global_control_enables_only_general_counters,
        global_status_is_read_only_and_cleared_bit_by_bit,
        version_5_can_set_status_bits_and_freeze_all_counters,
        version_5_reports_the_counters_in_use,
    ]
}

/// Register of the first fixed counter.
pub const FIXED: u32 = 0x309;
/// RDPMC number of the first fixed counter.
pub const RDPMC_FIXED: u32 = 0x4000_0000;
pub const DEBUG_CONTROL: u32 = 0x1d9;
/// Bit of debug control (`Freeze_PerfMon_On_PMI`): an overflow interrupt stops all counters.
pub const FREEZE: u64 = 1 << 12;
pub const GLOBAL_STATUS: u32 = 0x38e;
pub const GLOBAL_CONTROL: u32 = 0x38f;
/// Bits of all counters in the global registers. Those of the fixed counters begin at bit 32.
pub const COUNTERS: u64 = GENERAL | 0b11 << 32;

const GENERAL: u64 = 0b1111;
const CAPABILITIES: u32 = 0x345;
const FIXED_CONTROL: u32 = 0x38d;
const STATUS_CLEAR: u32 = 0x390;
const STATUS_SET: u32 = 0x391;
const IN_USE: u32 = 0x392;
/// Bit of global status (`CTR_Frz`): all counters are frozen.
const FROZEN: u64 = 1 << 59;
/// Bits of global status (`OvfBuf` and `CondChgd`) that are always 0 here. Clearing them is no fault.
const DEBUG_STORE_AND_CHANGED: u64 = 0b11 << 62;

/// Returns the addresses of an event select and its counter.
pub fn general(counter: u32) -> (u32, u32) {
    (0x186 + counter, 0xc1 + counter)
}

/// Returns the address for full-width writes to the counter.
fn full_width(counter: u32) -> u32 {
    0x4c1 + counter
}

/// Counters and event selects beyond the last, the register of PEBS, and AMD's registers.
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

/// Value for an event select with all bits but the enable bit and the reserved ones, 21 and 32 to 63.
const SELECT: u64 = 0xff9f_ffff;
/// Value for fixed control with all bits of two counters: both modes and the interrupt.
const FIXED_SELECT: u64 = 0xbb;

/// A register with reserved bits.
struct Reserved {
    register: u32,
    /// Value without reserved bits, which the register stores.
    kept: u64,
    /// Values with reserved bits.
    faulting: &'static [u64],
}

const RESERVED: [Reserved; 3] = [
    Reserved { register: 0x186, kept: SELECT, faulting: &[1 << 21, 1 << 32, 1 << 63, u64::MAX] },
    Reserved { register: FIXED_CONTROL, kept: FIXED_SELECT, faulting: &[1 << 2, 1 << 6, 1 << 8, 1 << 63] },
    Reserved { register: GLOBAL_CONTROL, kept: COUNTERS, faulting: &[1 << 4, 1 << 31, 1 << 34, 1 << 63] },
];

pub fn guests(steps: Steps) -> Steps {
    let steps = on_each(steps, &INTEL, "cpuid", "cpuid=0,0 cpuid=1,0 cpuid=0xa,0");
    let steps = on_each_with(steps, &INTEL, "halves", |pmu| {
        let half = |(_, counter)| {
            write(counter, 0x1234_8000_0001) + &read(counter) + &write(counter, 1 << 32 | 7) + &read(counter)
        };
        registers(pmu).map(half).collect()
    });
    let capabilities = read(CAPABILITIES) + &write(CAPABILITIES, 1 << 13);
    let wholes = (0..4).map(|counter| {
        let (_, half) = general(counter);
        write(full_width(counter), 1 << 47 | 5)
            + &read(half)
            + &write(full_width(counter), 1 << 48)
            + &write(half, 9)
            + &read(full_width(counter))
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

/// Consecutive writes: register, value, and the value of `IN_USE` after the write. Bit 63 is set if any counter's
/// overflow interrupt is enabled.
const IN_USES: [(u32, u64, u64); 6] = [
    (0x187, 0xc0, 0b10),
    (0x187, 0x03_0000, 0),
    (0x186, 0x3c, 0b01),
    (FIXED_CONTROL, 0x20, 1 << 33 | 0b01),
    (FIXED_CONTROL, 0x88, 1 << 63 | 0b01),
    (0x186, 1 << 20, 1 << 63),
];

fn cpuid_reports_the_vendor_and_the_counters() {
    const CAPABILITIES: u32 = 1 << 15;
    // On the AMD host, three of the seven architectural events are absent: bus cycles, and last-level cache references
    // and misses.
    let absent = match host::current() {
        Host::Amd => 0b1_1100,
        Host::Intel => 0,
    };
    for (pmu, capabilities, counters) in [
        (Pmu::Intel, CAPABILITIES, [0x0730_0405, absent, 0b11, 0x8602]),
        (Pmu::IntelV2, 0, [0x0730_0402, absent, 0, 0x602]),
    ] {
        let leaves = leaves(&printed(pmu, "cpuid"));
        let [_, b, c, d] = leaves[0].map(u32::to_le_bytes);
        assert_eq!([b, d, c].concat(), b"GenuineIntel", "{pmu:?}");
        assert_eq!((leaves[1][2] & CAPABILITIES, leaves[2]), (capabilities, counters), "{pmu:?}");
    }
}

fn a_write_to_a_general_counter_sign_extends_32_bits() {
    for pmu in INTEL {
        let half = |(_, counter)| {
            writes(counter) + &reads(counter, 0xffff_8000_0001) + &writes(counter) + &reads(counter, 7)
        };
        assert_eq!(printed(pmu, "halves"), registers(pmu).map(half).collect::<String>(), "{pmu:?}");
    }
}

fn full_width_writes_have_addresses_of_their_own() {
    let capabilities = reads(CAPABILITIES, 1 << 13) + &faults("wrmsr", CAPABILITIES);
    let wholes = (0..4).map(|counter| {
        let (_, half) = general(counter);
        writes(full_width(counter))
            + &reads(half, 1 << 47 | 5)
            + &faults("wrmsr", full_width(counter))
            + &writes(half)
            + &reads(full_width(counter), 9)
    });
    assert_eq!(printed(Pmu::Intel, "wholes"), capabilities + &wholes.collect::<String>());
    let capabilities = faults("rdmsr", CAPABILITIES) + &faults("wrmsr", CAPABILITIES);
    let none = (0..4).map(|counter| {
        let (_, half) = general(counter);
        let fault = faults("wrmsr", full_width(counter));
        fault.clone() + &reads(half, 0) + &fault + &writes(half) + &faults("rdmsr", full_width(counter))
    });
    assert_eq!(printed(Pmu::IntelV2, "wholes"), capabilities + &none.collect::<String>());
}

fn writes_of_reserved_bits_fault_and_change_nothing() {
    let written = RESERVED.iter().map(|case| {
        let faulting = faults("wrmsr", case.register).repeat(case.faulting.len());
        writes(case.register) + &faulting + &reads(case.register, case.kept) + &writes(case.register)
    });
    let written: String = written.collect();
    for pmu in INTEL {
        assert_eq!(printed(pmu, "reserved"), written, "{pmu:?}");
    }
}

fn debug_control_stores_the_freeze_bit() {
    for pmu in INTEL {
        let (write, read) = (writes(DEBUG_CONTROL), |value| reads(DEBUG_CONTROL, value));
        assert_eq!(
            printed(pmu, "debug-control"),
            format!("{write}{}{write}{}", read(FREEZE), read(0)),
            "{pmu:?}"
        );
    }
}

fn fixed_counters_are_written_at_full_width() {
    let full_width = |counter| reads(counter, 0) + &writes(counter) + &reads(counter, (1 << 48) - 2);
    for pmu in INTEL {
        let text = reads(FIXED_CONTROL, 0) + &full_width(FIXED) + &full_width(FIXED + 1);
        assert_eq!(printed(pmu, "fixed-registers"), text, "{pmu:?}");
    }
}

fn at_reset_global_control_enables_only_general_counters() {
    let count = |value| format!("count 1000 {value:016x}\n");
    for pmu in INTEL {
        let text = reads(GLOBAL_CONTROL, GENERAL)
            + &count(2001)
            + &count(0)
            + &writes(GLOBAL_CONTROL)
            + &count(0)
            + &count(2001)
            + &count(0);
        assert_eq!(printed(pmu, "global-control"), text, "{pmu:?}");
    }
}

fn global_status_is_read_only_and_cleared_bit_by_bit() {
    for pmu in INTEL {
        let text = printed(pmu, "status");
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

fn version_5_can_set_status_bits_and_freeze_all_counters() {
    let count = |value| format!("count 1000 {value:016x}\n");
    let fault = faults("wrmsr", STATUS_SET);
    assert_eq!(
        printed(Pmu::Intel, "status-set"),
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
        printed(Pmu::IntelV2, "status-set"),
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

fn version_5_reports_the_counters_in_use() {
    let told = |(register, _, in_use)| writes(register) + &reads(IN_USE, in_use);
    let text = reads(IN_USE, 0) + &IN_USES.map(told).concat() + &faults("wrmsr", IN_USE);
    assert_eq!(printed(Pmu::Intel, "in-use"), text);
    let silent = |(register, _, _)| writes(register) + &faults("rdmsr", IN_USE);
    let text = faults("rdmsr", IN_USE) + &IN_USES.map(silent).concat() + &faults("wrmsr", IN_USE);
    assert_eq!(printed(Pmu::IntelV2, "in-use"), text);
}
