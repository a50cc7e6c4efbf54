//! Tests of the registers against the manuals. This file has the tests that both vendors' PMUs share.

mod amd;
pub mod intel;

use guest_tests::lab::Steps;
use guest_tests::suite::Test;
use guest_tests::tests;

use crate::pmu::{EMULATED, Pmu, on_each_with, printed};

/// The tests of this module and those below it.
pub fn tests() -> Vec<Test> {
    let below = [amd::tests, intel::tests];
    below.into_iter().flat_map(|tests| tests()).chain(own()).collect()
}

/// The tests of this file.
fn own() -> Vec<Test> {
    tests![
        everything_is_zero_after_a_reset,
        every_register_is_stored_separately,
        registers_that_do_not_exist_fault,
        rdpmc_reads_existing_counters_and_faults_for_others,
    ]
}

/// Returns the addresses of all event selects and general counters that a guest's driver would use.
fn registers(pmu: Pmu) -> impl Iterator<Item = (u32, u32)> {
    let at = match pmu {
        Pmu::K7 => amd::k7,
        Pmu::V2 | Pmu::Core | Pmu::Kvm => amd::core,
        Pmu::Intel | Pmu::IntelV2 => intel::general,
    };
    (0..pmu.counters()).map(at)
}

/// Returns words for each event select and its counter.
fn each(pmu: Pmu, words: impl Fn(u32, u32) -> String) -> String {
    registers(pmu).map(|(select, counter)| words(select, counter)).collect()
}

/// Returns the RDPMC number and the register of each counter.
fn rdpmc_numbers(pmu: Pmu) -> impl Iterator<Item = (u32, u32)> {
    let general = (0..).zip(registers(pmu).map(|(_, counter)| counter));
    general.chain(
        (0..pmu.fixed_counters()).map(|counter| (intel::RDPMC_FIXED + counter, intel::FIXED + counter)),
    )
}

/// Returns RDPMC numbers that are valid on some PMUs, and some that are valid on none: general counters, fixed
/// counters, and both with the Pentium 4's bit for fast reads (bit 31).
fn rdpmc_numbers_anywhere() -> impl Iterator<Item = u32> {
    (0..8).chain([0x4000_0000, 0x4000_0001, 0x4000_0002, 0x8000_0000, 0x8000_0001, 0xc000_0000, 0xc000_0001])
}

/// Returns registers that the PMU does not have: the other vendor's, other PMUs' of the same vendor, and adjacent
/// addresses.
fn absent(pmu: Pmu) -> &'static [u32] {
    if pmu.is_intel() { &intel::ABSENT } else { &amd::ABSENT }
}

/// Returns the word that reads a register.
pub fn read(msr: u32) -> String {
    format!("rdmsr={msr:#x} ")
}

/// Returns the word that writes a register.
pub fn write(msr: u32, value: u64) -> String {
    format!("wrmsr={msr:#x},{:#x}:{:#x} ", value >> 32, value & 0xffff_ffff)
}

/// Returns the line of a read with this value.
pub fn reads(msr: u32, value: u64) -> String {
    format!("rdmsr {msr:08x} {value:016x}\n")
}

/// Returns the line of a write without a fault.
pub fn writes(msr: u32) -> String {
    format!("wrmsr {msr:08x} ok\n")
}

/// Returns the line of an access that raises a fault.
pub fn faults(instruction: &str, number: u32) -> String {
    format!("{instruction} {number:08x} fault\n")
}

pub fn guests(steps: Steps) -> Steps {
    let steps = on_each_with(steps, &EMULATED, "reset", |pmu| {
        each(pmu, |select, counter| read(select) + &read(counter))
    });
    let steps = on_each_with(steps, &EMULATED, "apart", |pmu| {
        let written = each(pmu, |select, counter| {
            write(counter, counter.into()) + &write(select, (counter & 0xf).into())
        });
        written + &each(pmu, |select, counter| read(select) + &read(counter))
    });
    let steps = on_each_with(steps, &EMULATED, "absent", |pmu| {
        absent(pmu).iter().map(|msr| read(*msr) + &write(*msr, 0)).collect()
    });
    let steps = on_each_with(steps, &EMULATED, "rdpmc", |pmu| {
        let written = rdpmc_numbers(pmu).map(|(_, counter)| write(counter, counter.into()));
        written.chain(rdpmc_numbers_anywhere().map(|number| format!("rdpmc={number:#x} "))).collect()
    });
    [amd::guests, intel::guests].into_iter().fold(steps, |steps, add| add(steps))
}

fn everything_is_zero_after_a_reset() {
    for pmu in EMULATED {
        let zeroes: String =
            registers(pmu).map(|(select, counter)| reads(select, 0) + &reads(counter, 0)).collect();
        assert_eq!(printed(pmu, "reset"), zeroes, "{pmu:?}");
    }
}

fn every_register_is_stored_separately() {
    for pmu in EMULATED {
        let written = registers(pmu).map(|(select, counter)| writes(counter) + &writes(select));
        let read = registers(pmu)
            .map(|(select, counter)| reads(select, (counter & 0xf).into()) + &reads(counter, counter.into()));
        assert_eq!(printed(pmu, "apart"), written.chain(read).collect::<String>(), "{pmu:?}");
    }
}

fn registers_that_do_not_exist_fault() {
    let fault = |msr: &u32| faults("rdmsr", *msr) + &faults("wrmsr", *msr);
    for pmu in EMULATED {
        assert_eq!(printed(pmu, "absent"), absent(pmu).iter().map(fault).collect::<String>(), "{pmu:?}");
    }
}

fn rdpmc_reads_existing_counters_and_faults_for_others() {
    for pmu in EMULATED {
        let written = rdpmc_numbers(pmu).map(|(_, counter)| writes(counter));
        let read = rdpmc_numbers_anywhere().map(|number| {
            match rdpmc_numbers(pmu).find(|(known, _)| *known == number) {
                Some((_, counter)) => format!("rdpmc {number:08x} {counter:016x}\n"),
                None => faults("rdpmc", number),
            }
        });
        assert_eq!(printed(pmu, "rdpmc"), written.chain(read).collect::<String>(), "{pmu:?}");
    }
}

/// Returns EAX, EBX, ECX and EDX of each line that the word `cpuid` printed.
fn leaves(text: &str) -> Vec<[u32; 4]> {
    let leaf = |line: &str| {
        let registers: Vec<_> =
            line.split(' ').skip(2).map(|text| u32::from_str_radix(text, 16).expect("hexadecimal")).collect();
        registers.try_into().expect("four registers")
    };
    text.lines().filter(|line| line.starts_with("cpuid ")).map(leaf).collect()
}
