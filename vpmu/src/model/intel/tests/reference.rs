//! Compares the model with a plain implementation of the manual, which counts without a host.

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::model::testing::counts_in_a_mode;

/// The PMU as the manual describes it. Counters 0 to 3 are general, 4 to 6 are fixed.
struct Reference {
    version: Version,
    selects: [u64; 4],
    fixed_control: u64,
    values: [u64; 7],
    control: u64,
    status: u64,
    freezes: bool,
    frozen: bool,
}

/// Returns a counter's bit in the global registers.
fn bit(counter: usize) -> u64 {
    if counter < 4 { 1 << counter } else { 1 << (32 + counter - 4) }
}

impl Reference {
    fn new(version: Version) -> Self {
        Self {
            version,
            selects: [0; 4],
            fixed_control: 0,
            values: [0; 7],
            control: 0xf,
            status: 0,
            freezes: false,
            frozen: false,
        }
    }

    fn counts(&self, counter: usize) -> bool {
        let enabled = if counter < 4 {
            self.selects[counter] & 1 << 22 != 0 && counts_in_a_mode(self.selects[counter])
        } else {
            self.fixed_control >> (4 * (counter - 4)) & 3 != 0
        };
        enabled && self.control & bit(counter) != 0 && !self.frozen
    }

    fn interrupts(&self, counter: usize) -> bool {
        if counter < 4 {
            self.selects[counter] & 1 << 20 != 0
        } else {
            self.fixed_control >> (4 * (counter - 4)) & 8 != 0
        }
    }

    /// Runs for `counts` counts. Returns the counts at which there is an interrupt.
    fn run(&mut self, mut counts: u64) -> Vec<u64> {
        let mut interrupts = Vec::new();
        let all = counts;
        loop {
            let counting: Vec<_> = (0..7).filter(|counter| self.counts(*counter)).collect();
            let until = |counter: &usize| MASK + 1 - self.values[*counter];
            let next = counting.iter().map(until).min().unwrap_or(u64::MAX);
            let step = counts.min(next);
            counts -= step;
            let mut interrupt = false;
            for counter in counting {
                self.values[counter] += step;
                if self.values[counter] > MASK {
                    self.values[counter] = 0;
                    self.status |= bit(counter);
                    interrupt |= self.interrupts(counter);
                }
            }
            if interrupt {
                interrupts.push(all - counts);
                self.freeze();
            }
            if counts == 0 {
                return interrupts;
            }
        }
    }

    fn freeze(&mut self) {
        match self.version {
            Version::V2 if self.freezes => self.control = 0,
            Version::V5 if self.freezes => self.frozen = true,
            _ => {}
        }
    }

    fn write(&mut self, msr: u32, value: u64) -> bool {
        let newer = self.version == Version::V5;
        let frozen = if newer { FROZEN } else { 0 };
        let general = |base: u32| usize::try_from(msr - base).unwrap();
        let fits = |mask: u64| value & !mask == 0;
        let low = i64::from(i32::from_le_bytes(value.to_le_bytes()[..4].try_into().unwrap()));
        match msr {
            COUNTER..0xc5 => self.values[general(COUNTER)] = low.cast_unsigned() & MASK,
            SELECT..0x18a if fits(0xffdf_ffff) => self.selects[general(SELECT)] = value,
            ALIAS..0x4c5 if newer && fits(MASK) => self.values[general(ALIAS)] = value,
            FIXED..0x30c => self.values[4 + general(FIXED)] = value & MASK,
            FIXED_CONTROL if fits(0xbbb) => self.fixed_control = value,
            CONTROL if fits(ALL) => self.control = value,
            STATUS_CLEAR if fits(ALL | frozen | 3 << 62) => {
                self.status &= !value;
                self.frozen &= value & frozen == 0;
            }
            STATUS_SET if newer && fits(ALL | frozen) => {
                self.status |= value & ALL;
                self.frozen |= value & frozen != 0;
            }
            DEBUGCTL if fits(1 << 12) => self.freezes = value != 0,
            _ => return false,
        }
        true
    }

    fn read(&self, counter: usize) -> u64 {
        self.values[counter]
    }

    fn status(&self) -> u64 {
        self.status | if self.frozen { FROZEN } else { 0 }
    }
}

#[derive(Debug, Clone)]
enum Step {
    Write(u32, u64),
    Run(u64),
}

/// Returns a strategy for registers of the PMU.
pub fn register() -> impl Strategy<Value = u32> {
    prop_oneof![
        0xc1_u32..0xc9,
        0x186_u32..0x18e,
        0x309_u32..0x30d,
        0x38d_u32..0x393,
        0x4c1_u32..0x4c9,
        Just(DEBUGCTL),
        Just(CONTROL),
        Just(FIXED_CONTROL),
    ]
}

fn value() -> impl Strategy<Value = u64> {
    prop_oneof![
        Just(0),
        Just(u64::MAX),
        Just(SAMPLING),
        Just(COUNTING),
        Just(ALL),
        Just(0xbbb),
        any::<u64>(),
        (1_u64..1000).prop_map(u64::wrapping_neg),
        (1_u64..1_000_000).prop_map(|distance| MASK + 1 - distance),
        (0_u32..64).prop_map(|bit| 1 << bit),
        any::<u64>().prop_map(|bits| bits & 0xffdf_ffff | SAMPLING),
        any::<u64>().prop_map(|bits| bits & ALL),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    // Counters often have the same event.
    let select = prop_oneof![4 => Just(SAMPLING), 2 => Just(COUNTING), 1 => Just(0)];
    prop_oneof![
        4 => (register(), value()).prop_map(|(msr, value)| Step::Write(msr, value)),
        2 => (0_u32..4, select).prop_map(|(counter, select)| Step::Write(SELECT + counter, select)),
        3 => prop_oneof![1_u64..20, 1_u64..2_000_000, 1_u64..1 << 47].prop_map(Step::Run),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn whatever_a_guest_does_its_registers_are_as_the_manual_says(
        steps in proptest::collection::vec(step(), 1..60),
        version in prop_oneof![Just(Version::V2), Just(Version::V5)],
    ) {
        let (mut pmu, host) = pmu(version);
        let mut reference = Reference::new(version);
        for step in steps {
            match step {
                Step::Write(msr, value) => {
                    let expected = if reference.write(msr, value) { Handled } else { Fault };
                    prop_assert_eq!(pmu.write(msr, value), expected, "{:#x} {:#x}", msr, value);
                }
                Step::Run(counts) => prop_assert_eq!(run(&mut pmu, &host, counts), reference.run(counts)),
            }
            prop_assert!(!pmu.unit().take_interrupt(), "only running raises interrupts");
            prop_assert_eq!(pmu.read(STATUS), Value(reference.status()));
            prop_assert_eq!(pmu.read(CONTROL), Value(reference.control));
            for counter in 0..7_u32 {
                let msr = if counter < 4 { COUNTER + counter } else { FIXED + counter - 4 };
                prop_assert_eq!(pmu.read(msr), Value(reference.read(counter as usize)), "{:#x}", msr);
            }
            host.time_passes(Duration::from_millis(20));
        }
    }
}
