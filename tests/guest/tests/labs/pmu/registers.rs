//! The registers, as the manuals have them. What both vendors' have in common is here.

mod amd;
pub mod intel;

use guest_tests::lab::Steps;
use guest_tests::suite::Test;
use guest_tests::tests;

use crate::pmu::{OURS, Pmu, on_each_its_own, said};

/// The tests of this module and those below it.
pub fn tests() -> Vec<Test> {
    let below = [amd::tests, intel::tests];
    below.into_iter().flat_map(|tests| tests()).chain(own()).collect()
}

/// The tests of this file.
fn own() -> Vec<Test> {
    tests![
        everything_is_zero_after_a_reset,
        every_register_has_a_value_of_its_own,
        registers_that_do_not_exist_fault,
        rdpmc_reads_the_counters_there_are_and_faults_beyond,
    ]
}

/// All event selects and general counters, at the addresses that a guest would use.
fn registers(pmu: Pmu) -> impl Iterator<Item = (u32, u32)> {
    let at = match pmu {
        Pmu::K7 => amd::k7,
        Pmu::V2 | Pmu::Core | Pmu::Kvm => amd::core,
        Pmu::Intel | Pmu::IntelV2 => intel::general,
    };
    (0..pmu.counters()).map(at)
}

/// Words for each of them.
fn each(pmu: Pmu, words: impl Fn(u32, u32) -> String) -> String {
    registers(pmu).map(|(select, counter)| words(select, counter)).collect()
}

/// Everything that can be read by RDPMC, by its number there and as a register.
fn rdpmc_numbers(pmu: Pmu) -> impl Iterator<Item = (u32, u32)> {
    let general = (0..).zip(registers(pmu).map(|(_, counter)| counter));
    general.chain(
        (0..pmu.fixed_counters()).map(|counter| (intel::RDPMC_FIXED + counter, intel::FIXED + counter)),
    )
}

/// Numbers that RDPMC has on one PMU or another, and some that it has on none: general counters, fixed ones, and both with the
/// bit by which the Pentium 4 read half of one.
fn rdpmc_numbers_anywhere() -> impl Iterator<Item = u32> {
    (0..8).chain([0x4000_0000, 0x4000_0001, 0x4000_0002, 0x8000_0000, 0x8000_0001, 0xc000_0000, 0xc000_0001])
}

/// The other vendor's registers, other PMUs' of the same vendor, and neighbours.
fn absent(pmu: Pmu) -> &'static [u32] {
    if pmu.is_intel() { &intel::ABSENT } else { &amd::ABSENT }
}

pub fn read(msr: u32) -> String {
    format!("rdmsr={msr:#x} ")
}

pub fn write(msr: u32, value: u64) -> String {
    format!("wrmsr={msr:#x},{:#x}:{:#x} ", value >> 32, value & 0xffff_ffff)
}

pub fn reads(msr: u32, value: u64) -> String {
    format!("rdmsr {msr:08x} {value:016x}\n")
}

pub fn writes(msr: u32) -> String {
    format!("wrmsr {msr:08x} ok\n")
}

pub fn faults(instruction: &str, number: u32) -> String {
    format!("{instruction} {number:08x} fault\n")
}

pub fn guests(steps: Steps) -> Steps {
    let steps = on_each_its_own(steps, &OURS, "reset", |pmu| {
        each(pmu, |select, counter| read(select) + &read(counter))
    });
    let steps = on_each_its_own(steps, &OURS, "apart", |pmu| {
        let written = each(pmu, |select, counter| {
            write(counter, counter.into()) + &write(select, (counter & 0xf).into())
        });
        written + &each(pmu, |select, counter| read(select) + &read(counter))
    });
    let steps = on_each_its_own(steps, &OURS, "absent", |pmu| {
        absent(pmu).iter().map(|msr| read(*msr) + &write(*msr, 0)).collect()
    });
    let steps = on_each_its_own(steps, &OURS, "rdpmc", |pmu| {
        let written = rdpmc_numbers(pmu).map(|(_, counter)| write(counter, counter.into()));
        written.chain(rdpmc_numbers_anywhere().map(|number| format!("rdpmc={number:#x} "))).collect()
    });
    [amd::guests, intel::guests].into_iter().fold(steps, |steps, add| add(steps))
}

fn everything_is_zero_after_a_reset() {
    for pmu in OURS {
        let zeroes: String =
            registers(pmu).map(|(select, counter)| reads(select, 0) + &reads(counter, 0)).collect();
        assert_eq!(said(pmu, "reset"), zeroes, "{pmu:?}");
    }
}

fn every_register_has_a_value_of_its_own() {
    for pmu in OURS {
        let written = registers(pmu).map(|(select, counter)| writes(counter) + &writes(select));
        let read = registers(pmu)
            .map(|(select, counter)| reads(select, (counter & 0xf).into()) + &reads(counter, counter.into()));
        assert_eq!(said(pmu, "apart"), written.chain(read).collect::<String>(), "{pmu:?}");
    }
}

fn registers_that_do_not_exist_fault() {
    let fault = |msr: &u32| faults("rdmsr", *msr) + &faults("wrmsr", *msr);
    for pmu in OURS {
        assert_eq!(said(pmu, "absent"), absent(pmu).iter().map(fault).collect::<String>(), "{pmu:?}");
    }
}

fn rdpmc_reads_the_counters_there_are_and_faults_beyond() {
    for pmu in OURS {
        let written = rdpmc_numbers(pmu).map(|(_, counter)| writes(counter));
        let read = rdpmc_numbers_anywhere().map(|number| {
            match rdpmc_numbers(pmu).find(|(known, _)| *known == number) {
                Some((_, counter)) => format!("rdpmc {number:08x} {counter:016x}\n"),
                None => faults("rdpmc", number),
            }
        });
        assert_eq!(said(pmu, "rdpmc"), written.chain(read).collect::<String>(), "{pmu:?}");
    }
}

/// EAX, EBX, ECX and EDX of the lines that CPUID printed.
fn leaves(text: &str) -> Vec<[u32; 4]> {
    let leaf = |line: &str| {
        let registers: Vec<_> =
            line.split(' ').skip(2).map(|text| u32::from_str_radix(text, 16).expect("hexadecimal")).collect();
        registers.try_into().expect("four registers")
    };
    text.lines().filter(|line| line.starts_with("cpuid ")).map(leaf).collect()
}
