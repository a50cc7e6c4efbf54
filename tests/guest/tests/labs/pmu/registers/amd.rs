//! Tests of AMD's registers (APM volume 2, section 13.2).

use guest_tests::lab::Steps;
use guest_tests::suite::Test;
use guest_tests::tests;

use super::{each, faults, leaves, read, reads, registers, write, writes};
use crate::pmu::{AMD, Pmu, QUICK, on_each, on_each_with, output, printed};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    tests![
        event_selects_drop_the_reserved_bits_without_a_fault,
        counters_have_48_bits_and_ignore_the_others,
        the_first_four_counters_have_two_addresses_each,
        older_pmus_lack_the_registers_of_newer_ones,
        global_status_changes_only_through_its_set_and_clear_registers,
        global_control_enables_all_counters_at_reset,
        cpuid_reports_the_existing_registers,
        a_guest_with_two_counters_has_no_more,
    ]
}

const GLOBAL_STATUS: u32 = 0xc000_0300;
const GLOBAL_CONTROL: u32 = 0xc000_0301;
const GLOBAL_STATUS_CLEAR: u32 = 0xc000_0302;
const GLOBAL_STATUS_SET: u32 = 0xc000_0303;

/// Returns the addresses of an event select and its counter on the K7.
pub fn k7(counter: u32) -> (u32, u32) {
    (0xc001_0000 + counter, 0xc001_0004 + counter)
}

/// Returns the addresses of an event select and its counter with `PerfCtrExtCore`.
pub fn core(counter: u32) -> (u32, u32) {
    (0xc001_0200 + 2 * counter, 0xc001_0201 + 2 * counter)
}

/// Value for an event select with all bits but the enable bit.
const SELECT: u64 = !(1 << 22);
/// Value that an event select then returns: bits 19, 21, 36 to 39 and 42 to 63 are reserved.
const SELECT_KEPT: u64 = 0x0000_030f_ff97_ffff;

pub fn guests(steps: Steps) -> Steps {
    let steps = on_each_with(steps, &AMD, "selects", |pmu| {
        each(pmu, |select, _| write(select, SELECT) + &read(select) + &write(select, 0) + &read(select))
    });
    let steps = on_each_with(steps, &AMD, "counters", |pmu| {
        each(pmu, |_, counter| write(counter, u64::MAX) + &read(counter))
    });
    let steps = on_each_with(steps, &AMD, "wide", |pmu| {
        each(pmu, |_, counter| write(counter, 1 << 63 | 1 << 48 | 5) + &read(counter))
    });
    let steps = on_each(steps, &[Pmu::V2, Pmu::Core], "two-addresses", &two_addresses());
    let core_addresses = read(core(0).0) + &read(core(0).1) + &write(core(5).0, 0) + &write(core(5).1, 0);
    let steps = on_each(steps, &[Pmu::Core, Pmu::K7], "core-addresses", &core_addresses);
    let global = GLOBAL.map(|msr| read(msr) + &write(msr, 0)).concat();
    let steps = on_each(steps, &[Pmu::Core, Pmu::K7], "global", &global);
    with_global_registers(on_each(steps, &AMD, "cpuid", "cpuid=0x80000001,0 cpuid=0x80000022,0"))
}

fn with_global_registers(steps: Steps) -> Steps {
    let status = write(GLOBAL_STATUS, 0)
        + &write(GLOBAL_STATUS_SET, u64::MAX)
        + &read(GLOBAL_STATUS)
        + &write(GLOBAL_STATUS_CLEAR, 0b10_0001)
        + &read(GLOBAL_STATUS)
        + &write(GLOBAL_STATUS_CLEAR, 0)
        + &write(GLOBAL_STATUS_SET, 0b1)
        + &read(GLOBAL_STATUS)
        + &read(GLOBAL_STATUS_SET)
        + &read(GLOBAL_STATUS_CLEAR)
        + &write(GLOBAL_STATUS_CLEAR, u64::MAX)
        + &read(GLOBAL_STATUS);
    let counting = "count-user=0:0x4100c0,1000 ";
    let control = read(GLOBAL_CONTROL)
        + counting
        + &write(GLOBAL_CONTROL, u64::MAX)
        + &read(GLOBAL_CONTROL)
        + &write(GLOBAL_CONTROL, !1)
        + &read(GLOBAL_CONTROL)
        + counting
        + &write(GLOBAL_CONTROL, 1)
        + counting;
    let steps = on_each(steps, &[Pmu::V2], "status", &status);
    let steps = on_each(steps, &[Pmu::V2], "control", &control);
    let two = read(GLOBAL_CONTROL)
        + &[core(1), core(2), k7(1), k7(2)].map(|(select, counter)| read(select) + &read(counter)).concat()
        + &write(GLOBAL_STATUS_SET, u64::MAX)
        + &read(GLOBAL_STATUS)
        + "cpuid=0x80000022,0";
    steps.bare_metal("two-counters", "--pmu amd --counters 2", &two)
}

/// Registers of Intel's PMUs, of AMD's other PMUs, and adjacent addresses.
pub const ABSENT: [u32; 13] =
    [0xc1, 0xc8, 0x186, 0x18d, 0x309, 0x345, 0x38d, 0x38e, 0x38f, 0x390, 0x4c1, 0xc001_0230, 0xc001_0240];

const GLOBAL: [u32; 4] = [GLOBAL_STATUS, GLOBAL_CONTROL, GLOBAL_STATUS_CLEAR, GLOBAL_STATUS_SET];

/// Returns words that write each of the first four counters and its event select at one address, and read it at the
/// other.
fn two_addresses() -> String {
    let words = |counter: u32| {
        let ((old_select, old_counter), (select, counter)) = (k7(counter), core(counter));
        write(old_select, 0x76)
            + &read(select)
            + &write(select, 0xc0)
            + &read(old_select)
            + &write(old_counter, 7)
            + &read(counter)
            + &write(counter, 8)
            + &read(old_counter)
    };
    (0..4).map(words).collect()
}

fn event_selects_drop_the_reserved_bits_without_a_fault() {
    for pmu in AMD {
        let all =
            |(select, _)| writes(select) + &reads(select, SELECT_KEPT) + &writes(select) + &reads(select, 0);
        assert_eq!(printed(pmu, "selects"), registers(pmu).map(all).collect::<String>(), "{pmu:?}");
    }
}

fn counters_have_48_bits_and_ignore_the_others() {
    for pmu in AMD {
        let full = |(_, counter)| writes(counter) + &reads(counter, (1 << 48) - 1);
        assert_eq!(printed(pmu, "counters"), registers(pmu).map(full).collect::<String>(), "{pmu:?}");
        let low = |(_, counter)| writes(counter) + &reads(counter, 5);
        assert_eq!(printed(pmu, "wide"), registers(pmu).map(low).collect::<String>(), "{pmu:?}");
    }
}

fn the_first_four_counters_have_two_addresses_each() {
    let each = |counter| {
        let ((old_select, old_counter), (select, counter)) = (k7(counter), core(counter));
        writes(old_select)
            + &reads(select, 0x76)
            + &writes(select)
            + &reads(old_select, 0xc0)
            + &writes(old_counter)
            + &reads(counter, 7)
            + &writes(counter)
            + &reads(old_counter, 8)
    };
    for pmu in [Pmu::V2, Pmu::Core] {
        assert_eq!(printed(pmu, "two-addresses"), (0..4).map(each).collect::<String>(), "{pmu:?}");
    }
}

fn older_pmus_lack_the_registers_of_newer_ones() {
    let fault = |msr| faults("rdmsr", msr) + &faults("wrmsr", msr);
    for pmu in [Pmu::Core, Pmu::K7] {
        assert_eq!(printed(pmu, "global"), GLOBAL.map(fault).concat(), "{pmu:?}");
    }
    let (first, last) = (core(0), core(5));
    assert_eq!(
        printed(Pmu::K7, "core-addresses"),
        faults("rdmsr", first.0)
            + &faults("rdmsr", first.1)
            + &faults("wrmsr", last.0)
            + &faults("wrmsr", last.1)
    );
    assert_eq!(
        printed(Pmu::Core, "core-addresses"),
        reads(first.0, 0) + &reads(first.1, 0) + &writes(last.0) + &writes(last.1)
    );
}

fn global_status_changes_only_through_its_set_and_clear_registers() {
    assert_eq!(
        printed(Pmu::V2, "status"),
        faults("wrmsr", GLOBAL_STATUS)
            + &writes(GLOBAL_STATUS_SET)
            + &reads(GLOBAL_STATUS, 0b11_1111)
            + &writes(GLOBAL_STATUS_CLEAR)
            + &reads(GLOBAL_STATUS, 0b01_1110)
            + &writes(GLOBAL_STATUS_CLEAR)
            + &writes(GLOBAL_STATUS_SET)
            + &reads(GLOBAL_STATUS, 0b01_1111)
            + &reads(GLOBAL_STATUS_SET, 0)
            + &reads(GLOBAL_STATUS_CLEAR, 0)
            + &writes(GLOBAL_STATUS_CLEAR)
            + &reads(GLOBAL_STATUS, 0)
    );
}

fn global_control_enables_all_counters_at_reset() {
    let count = |value| format!("count 1000 {value:016x}\n");
    assert_eq!(
        printed(Pmu::V2, "control"),
        reads(GLOBAL_CONTROL, 0b11_1111)
            + &count(2001)
            + &writes(GLOBAL_CONTROL)
            + &reads(GLOBAL_CONTROL, 0b11_1111)
            + &writes(GLOBAL_CONTROL)
            + &reads(GLOBAL_CONTROL, 0b11_1110)
            + &count(0)
            + &writes(GLOBAL_CONTROL)
            + &count(2001)
    );
}

fn cpuid_reports_the_existing_registers() {
    const CORE_REGISTERS: u32 = 1 << 23;
    for (pmu, core_registers, version) in
        [(Pmu::V2, CORE_REGISTERS, [1, 6, 0, 0]), (Pmu::Core, CORE_REGISTERS, [0; 4]), (Pmu::K7, 0, [0; 4])]
    {
        let leaves = leaves(&printed(pmu, "cpuid"));
        assert_eq!((leaves[0][2] & CORE_REGISTERS, leaves[1]), (core_registers, version), "{pmu:?}");
    }
}

fn a_guest_with_two_counters_has_no_more() {
    let text = output(QUICK.of("two-counters"));
    let mut wanted = reads(GLOBAL_CONTROL, 0b11);
    for addresses in [core, k7] {
        let ((select, counter), (no_select, no_counter)) = (addresses(1), addresses(2));
        wanted += &(reads(select, 0) + &reads(counter, 0));
        wanted += &(faults("rdmsr", no_select) + &faults("rdmsr", no_counter));
    }
    wanted += &(writes(GLOBAL_STATUS_SET) + &reads(GLOBAL_STATUS, 0b11));
    assert_eq!(text.split("cpuid").next(), Some(wanted.as_str()));
    assert_eq!(leaves(&text), [[1, 2, 0, 0]]);
}
