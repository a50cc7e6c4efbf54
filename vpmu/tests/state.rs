//! A PMU whose state is saved and restored, at any point and any number of times, behaves as one whose state was not.
//! The guests of two PMUs do the same at random; one PMU is replaced now and then by a new one on a new host, which
//! gets its state as JSON.

use std::convert::Infallible;
use std::num::NonZeroU32;
use std::time::Duration;

use proptest::prelude::*;
use vpmu::model::{amd, intel, riscv};
use vpmu::policy::Policy;
use vpmu::shared_page::LvtNote;
use vpmu::source::script::Script;
use vpmu::state::{Mismatch, PmuState};
use vpmu::x86::Vendor;
use vpmu::{Access, Cause, Injected, Outcome, Platform, Switch, VirtualPmu};

/// The PMUs that are tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Amd(amd::Version),
    Intel(intel::Version),
    Riscv { overflows: bool },
}

const KINDS: [Kind; 7] = [
    Kind::Amd(amd::Version::K7),
    Kind::Amd(amd::Version::Core),
    Kind::Amd(amd::Version::V2(4)),
    Kind::Intel(intel::Version::V2),
    Kind::Intel(intel::Version::V5),
    Kind::Riscv { overflows: true },
    Kind::Riscv { overflows: false },
];

/// A guest on a scripted host.
struct Guest {
    kind: Kind,
    host: Script,
    pmu: VirtualPmu<Script>,
    interrupts: Interrupts,
    /// An alarm has expired since the last exit.
    is_alarmed: bool,
}

/// Counts interrupts. The guest takes them later, so that all alarms are set as soon as they are known.
#[derive(Default)]
struct Interrupts(u64);

impl Platform for Interrupts {
    type Error = Infallible;

    fn inject(&mut self, _lvt_note: Option<LvtNote<'_>>) -> Result<Injected, Infallible> {
        self.0 += 1;
        Ok(Injected::Pending)
    }
}

fn policy() -> Policy {
    Policy { max_interrupts_per_second: NonZeroU32::new(20), ..Policy::default() }
}

impl Guest {
    fn new(kind: Kind) -> Self {
        let host = Script::default();
        let source = host.clone();
        let mut pmu = match kind {
            Kind::Amd(version) => VirtualPmu::amd(version, Vendor::Amd, source),
            Kind::Intel(version) => {
                let shape = intel::Shape { version, general: 4, fixed: 3, absent: 0 };
                VirtualPmu::intel(shape, Vendor::Intel, source)
            }
            Kind::Riscv { overflows } => {
                VirtualPmu::riscv(riscv::Shape { programmable: 4, overflows }, source)
            }
        };
        pmu.set_policy(&policy());
        Self { kind, host, pmu, interrupts: Interrupts::default(), is_alarmed: false }
    }

    fn exits(&mut self, cause: Cause) {
        let cause = match (std::mem::take(&mut self.is_alarmed), cause) {
            (false, cause) => cause,
            (true, Cause::Kick) => Cause::AlarmAndKick,
            (true, _) => Cause::Alarm,
        };
        let Ok(_) = self.pmu.after_exit(cause, &mut self.interrupts);
    }

    /// Does a step. Returns what the guest notices of it: what it read, and the counts at which it was interrupted.
    fn does(&mut self, step: &Step) -> Vec<u64> {
        match *step {
            Step::Read(register) => {
                let outcome = self.pmu.access(Access::Read(self.register(register)));
                self.exits(Cause::Guest);
                vec![number(outcome)]
            }
            Step::Write(register, value) => {
                let outcome = self.pmu.access(Access::Write(self.register(register), value));
                self.exits(Cause::Guest);
                vec![number(outcome)]
            }
            Step::Call(function, arguments) => {
                let answer = self.pmu.call(function, arguments);
                self.exits(Cause::Guest);
                vec![answer.error.cast_unsigned(), answer.value]
            }
            Step::Run(counts) => {
                let (host, mut noticed) = (self.host.clone(), Vec::new());
                if self.is_alarmed {
                    // A guest does not run while an alarm waits: the signal makes it leave at once.
                    let before = self.interrupts.0;
                    self.exits(Cause::Alarm);
                    noticed.extend((before..self.interrupts.0).map(|_| 0));
                }
                host.guest_runs(counts, |left| {
                    let before = self.interrupts.0;
                    self.is_alarmed = true;
                    if left == 0 {
                        // The next step is done before this alarm is handled, or the PMU is saved before.
                        return;
                    }
                    self.exits(Cause::Alarm);
                    noticed.extend((before..self.interrupts.0).map(|_| counts - left));
                });
                noticed
            }
            Step::Wait(milliseconds) => {
                self.host.time_passes(Duration::from_millis(milliseconds));
                let before = self.interrupts.0;
                self.exits(Cause::Kick);
                vec![self.interrupts.0 - before]
            }
            Step::Switch(counter, to) => vec![self.pmu.set_counter_switch(counter, to).into()],
        }
    }

    /// Chooses one of the registers of this kind, of which some do not exist.
    fn register(&self, number: u32) -> u32 {
        const INTELS: [u32; 26] = [
            0xc1,
            0xc2,
            0xc3,
            0xc4,
            0x186,
            0x187,
            0x188,
            0x189,
            0x1d9,
            0x309,
            0x30a,
            0x30b,
            0x345,
            0x38d,
            0x38e,
            0x38f,
            0x390,
            0x391,
            0x392,
            0x4c1,
            0x4c2,
            0x4c3,
            0x4c4,
            0x4c5,
            0,
            0x4000_0001,
        ];
        match self.kind {
            Kind::Amd(_) if number < 9 => 0xc001_0000 + number,
            Kind::Amd(_) if number < 22 => 0xc001_0200 + number - 9,
            Kind::Amd(_) => 0xc000_0300 + number - 22,
            Kind::Intel(_) => INTELS[number as usize % INTELS.len()],
            Kind::Riscv { .. } if number < 8 => 0xc00 + number,
            Kind::Riscv { .. } => 0xda0,
        }
    }

    /// Saves the PMU, and continues with a new one on a new host.
    fn moves(&mut self) {
        let state = serde_json::to_string(&self.pmu.save()).unwrap();
        let mut restored = Self::new(self.kind);
        restored.pmu.restore(&serde_json::from_str(&state).unwrap()).unwrap();
        restored.interrupts.0 = self.interrupts.0;
        *self = restored;
    }
}

fn number(outcome: Outcome) -> u64 {
    match outcome {
        Outcome::Value(value) => value,
        Outcome::Handled => u64::MAX,
        Outcome::Fault => u64::MAX - 1,
        Outcome::NotHandled => u64::MAX - 2,
    }
}

/// What a guest, its host or its operator does.
#[derive(Debug, Clone)]
enum Step {
    Read(u32),
    Write(u32, u64),
    Call(u64, [u64; 6]),
    Run(u64),
    Wait(u64),
    Switch(usize, Switch),
}

/// Returns steps, and after which of them the PMU moves.
fn steps() -> impl Strategy<Value = Vec<(Step, bool)>> {
    // Selects of instructions and cycles, enabled with and without interrupts, by each vendor's codes.
    let select = (prop_oneof![Just(0x76_u64), Just(0xc0), Just(0x3c), Just(0xc2)], 0_u64..16)
        .prop_map(|(code, bits)| code | 1 << 22 | (bits & 3) << 16 | (bits >> 2 & 1) << 20);
    let value = prop_oneof![
        4 => select,
        3 => (1_u64..10).prop_map(|distance| (1 << 48) - 100 * distance),
        1 => (1_u64..3000).prop_map(|distance| (1 << 48) - distance),
        1 => (1_u64..3000).prop_map(u64::wrapping_neg),
        2 => 0_u64..0x1000,
        1 => Just(0x7_0000_000f),
        1 => Just(1 << 59),
        1 => Just(1 << 12),
        1 => any::<u64>(),
    ];
    let register = 0_u32..29;
    let call = (0_u64..6, 0_u64..2, 0_u64..0x80, 0_u64..0x40, 1_u64..11, 0_u64..3000).prop_map(
        |(function, base, mask, flags, event, distance)| {
            // START takes a value where CONFIGURE_MATCHING takes an event.
            let third = if function == 3 { distance.wrapping_neg() } else { event };
            Step::Call(function, [base, mask, flags, third, 0, 0])
        },
    );
    let freeze = prop_oneof![Just(Step::Write(8, 1 << 12)), Just(Step::Write(17, 1 << 59))];
    let step = prop_oneof![
        1 => freeze,
        3 => register.clone().prop_map(Step::Read),
        6 => (register, value).prop_map(|(register, value)| Step::Write(register, value)),
        5 => call,
        3 => (1_u64..5000).prop_map(Step::Run),
        // As far as an overflow, often.
        2 => (1_u64..10).prop_map(|counts| Step::Run(100 * counts)),
        1 => (1_u64..200).prop_map(Step::Wait),
        1 => (0_usize..8, prop_oneof![Just(Switch::On), Just(Switch::Off)])
            .prop_map(|(counter, to)| Step::Switch(counter, to)),
    ];
    proptest::collection::vec((step, prop::bool::weighted(0.3)), 1..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_restored_pmu_behaves_as_one_that_was_not_saved(steps in steps()) {
        for kind in KINDS {
            let (mut stays, mut moves) = (Guest::new(kind), Guest::new(kind));
            for (number, (step, is_moved)) in steps.iter().enumerate() {
                prop_assert_eq!(stays.does(step), moves.does(step), "{:?}: step {}, {:?}", kind, number, step);
                if *is_moved {
                    // The other one updates its counters then, too.
                    prop_assert_eq!(stays.pmu.save(), moves.pmu.save(), "{:?}: after step {}", kind, number);
                    moves.moves();
                    stays.exits(Cause::Guest);
                    moves.exits(Cause::Guest);
                    prop_assert_eq!(stays.interrupts.0, moves.interrupts.0);
                }
            }
            prop_assert_eq!(stays.pmu.save(), moves.pmu.save());
        }
    }

    #[test]
    fn no_number_in_a_file_does_harm(number in "[0-9]{1,20}", at in 0_usize..100, steps in steps()) {
        for kind in KINDS {
            let mut guest = Guest::new(kind);
            for (step, _) in &steps {
                guest.does(step);
            }
            let saved = serde_json::to_string(&guest.pmu.save()).unwrap();
            let Ok(state) = serde_json::from_str::<PmuState>(&with_number(&saved, at, &number)) else { continue };
            let mut restored = Guest::new(kind);
            if restored.pmu.restore(&state).is_ok() {
                restored.exits(Cause::Guest);
                for (step, _) in &steps {
                    restored.does(step);
                }
            }
        }
    }
}

/// Replaces one of the numbers in a text.
fn with_number(text: &str, at: usize, number: &str) -> String {
    let is_digit = |c: char| c.is_ascii_digit();
    let starts: Vec<usize> = text
        .match_indices(is_digit)
        .map(|(start, _)| start)
        .filter(|start| !text[..*start].ends_with(is_digit))
        .collect();
    let start = starts[at % starts.len()];
    format!("{}{number}{}", &text[..start], text[start..].trim_start_matches(is_digit))
}

#[test]
fn a_state_of_another_pmu_is_refused_and_changes_nothing() {
    for saved in KINDS {
        for other in KINDS {
            let state = Guest::new(saved).pmu.save();
            let mut guest = Guest::new(other);
            let before = guest.pmu.save();
            let expected = if saved == other { Ok(()) } else { Err(Mismatch::Shape) };
            assert_eq!(guest.pmu.restore(&state), expected, "{saved:?} on {other:?}");
            assert_eq!(guest.pmu.save(), before);
        }
    }
}

#[test]
fn a_register_that_no_guest_can_have_written_is_refused() {
    let mut guest = Guest::new(Kind::Intel(intel::Version::V5));
    let saved = serde_json::to_string(&guest.pmu.save()).unwrap();
    for (right, wrong, what) in [
        (r#""fixed_control":0"#, r#""fixed_control":4"#, "fixed control"),
        (r#""debug_control":0"#, r#""debug_control":1"#, "debug control"),
        (r#""selects":[0,"#, r#""selects":[2097152,"#, "event selects"),
        (r#""status":0"#, r#""status":128"#, "global status"),
    ] {
        assert!(saved.contains(right), "{saved}");
        let state = serde_json::from_str(&saved.replace(right, wrong)).unwrap();
        assert_eq!(guest.pmu.restore(&state), Err(Mismatch::Value(what)));
    }
}
