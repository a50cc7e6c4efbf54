//! Compares the model with a plain implementation of the specification, which counts without a host.

use proptest::prelude::*;

use super::*;

/// A counter as the specification describes it.
#[derive(Debug, Clone, Copy, Default)]
struct Plain {
    /// Set if the counter is configured: whether it counts at any privilege level.
    used: Option<bool>,
    value: u64,
    started: bool,
    overflown: bool,
}

/// The PMU as the specification describes it, with up to nine counters.
struct Reference {
    shape: Shape,
    counters: [Plain; 9],
    denied: bool,
}

/// What a call may return.
#[derive(Debug)]
enum Expected {
    /// This error and this value.
    Exactly(i64, u64),
    /// Success, and the number of one of these counters.
    OneOf(Vec<usize>),
}

fn fails(error: i64) -> Expected {
    Expected::Exactly(error, 0)
}

impl Reference {
    fn new(shape: Shape) -> Self {
        Self { shape, counters: [Plain::default(); 9], denied: false }
    }

    fn set(&self, base: u64, mask: u64) -> Option<Vec<usize>> {
        let numbers = (0..64).filter(|bit| mask & 1 << bit != 0).map(|bit| u128::from(base) + bit);
        let there = |number: u128| {
            let number = usize::try_from(number).ok()?;
            (number < self.shape.size() && number != 1).then_some(number)
        };
        let set: Vec<_> = numbers.map(there).collect::<Option<_>>()?;
        (!set.is_empty()).then_some(set)
    }

    /// Runs for `counts` counts. Returns the counts at which there is an interrupt.
    fn run(&mut self, counts: u64) -> Vec<u64> {
        let mut interrupts = Vec::new();
        for (number, counter) in self.counters.iter_mut().enumerate() {
            if !counter.started || counter.used != Some(true) || self.denied {
                continue;
            }
            let until = u128::from(u64::MAX - counter.value) + 1;
            if u128::from(counts) >= until && number >= 3 && self.shape.overflows {
                if !counter.overflown {
                    interrupts.push(u64::try_from(until).unwrap());
                }
                counter.overflown = true;
            }
            counter.value = counter.value.wrapping_add(counts);
        }
        interrupts.sort_unstable();
        interrupts.dedup();
        interrupts
    }

    fn configures(&self, [base, mask, flags, event, data, _]: [u64; 6]) -> Expected {
        let Some(set) = self.set(base, mask) else { return fails(INVALID_PARAM) };
        // Of the events that the strategy below generates, the scripted host lacks two.
        let exists =
            matches!(event, 1..=6 | 8..=10 | DTLB_LOAD_MISSES | RAW) && (event, data) != (RAW, 0xbad);
        if !exists || self.denied {
            return fails(NOT_SUPPORTED);
        }
        let is_able = |counter: &usize| match counter {
            0 => event == CYCLES,
            2 => event == INSTRUCTIONS,
            _ => true,
        };
        let group = if flags & SKIP_MATCH != 0 {
            set.into_iter().take(1).filter(is_able).collect()
        } else {
            let is_free = |counter: &usize| is_able(counter) && self.counters[*counter].used.is_none();
            let only_fixed = set.iter().all(|counter| *counter < 3);
            let (fixed, programmable): (Vec<_>, Vec<_>) =
                set.into_iter().filter(is_free).partition(|counter| *counter < 3);
            let takes_fixed = only_fixed || !self.shape.overflows;
            if takes_fixed && !fixed.is_empty() { fixed } else { programmable }
        };
        if group.is_empty() { fails(NOT_SUPPORTED) } else { Expected::OneOf(group) }
    }

    fn is_configured(&mut self, number: usize, flags: u64) {
        let counter = &mut self.counters[number];
        counter.used = Some(flags & (NOT_IN_USER_MODE | NOT_IN_THE_KERNEL) != 0x60);
        counter.overflown = false;
        counter.started |= flags & AUTO_START != 0;
        if flags & CLEAR_VALUE != 0 {
            counter.value = 0;
        }
    }

    fn starts(&mut self, [base, mask, flags, value, ..]: [u64; 6]) -> i64 {
        let Some(set) = self.set(base, mask).filter(|_| flags < 4) else { return INVALID_PARAM };
        if flags & 2 != 0 {
            return NO_SHMEM;
        }
        if set.iter().any(|number| *number >= 3 && self.counters[*number].used.is_none()) {
            return INVALID_PARAM;
        }
        let mut error = SUCCESS;
        for number in set {
            let counter = &mut self.counters[number];
            counter.used = counter.used.or(Some(true));
            if counter.started {
                error = ALREADY_STARTED;
                continue;
            }
            (counter.started, counter.overflown) = (true, false);
            if flags & SET_INIT_VALUE != 0 {
                counter.value = value;
            }
        }
        error
    }

    fn stops(&mut self, [base, mask, flags, ..]: [u64; 6]) -> i64 {
        let Some(set) = self.set(base, mask).filter(|_| flags < 4) else { return INVALID_PARAM };
        if flags & 2 != 0 {
            return NO_SHMEM;
        }
        let mut error = SUCCESS;
        for number in set {
            let counter = &mut self.counters[number];
            if !std::mem::take(&mut counter.started) {
                error = ALREADY_STOPPED;
            }
            if flags & RESET != 0 {
                (counter.used, counter.overflown) = (None, false);
            }
        }
        error
    }

    fn call(&mut self, function: u64, arguments: [u64; 6]) -> Expected {
        match function {
            0 => Expected::Exactly(SUCCESS, self.shape.size() as u64),
            1 => match self.set(arguments[0], 1) {
                Some(_) => Expected::Exactly(SUCCESS, 0x3_fc00 + arguments[0]),
                None => fails(INVALID_PARAM),
            },
            2 => self.configures(arguments),
            3 => fails(self.starts(arguments)),
            4 => fails(self.stops(arguments)),
            5 | 6 => fails(INVALID_PARAM),
            _ => fails(NOT_SUPPORTED),
        }
    }

    fn overflows(&self) -> u64 {
        let counters = (0..).zip(&self.counters);
        counters.fold(0, |set, (number, counter)| set | u64::from(counter.overflown) << number)
    }
}

#[derive(Debug, Clone)]
enum Step {
    Call(u64, [u64; 6]),
    Run(u64),
    SetPolicy(Freeze, Denies),
    /// What the VMM does from time to time.
    ReleaseIdle,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Denies {
    Nothing,
    Everything,
}

/// Returns a strategy for base and mask: mostly one or several counters that exist.
fn set() -> impl Strategy<Value = (u64, u64)> {
    prop_oneof![
        8 => (0_u64..9).prop_map(|counter| (counter, 1)),
        4 => Just((0, ALL)),
        4 => (0..=ALL).prop_map(|mask| (0, mask & ALL)),
        2 => (0_u64..70, 0_u64..16),
        1 => (any::<u64>(), any::<u64>()),
        1 => (any::<u32>().prop_map(|base| u64::MAX - u64::from(base)), any::<u64>()),
    ]
}

fn event() -> impl Strategy<Value = (u64, u64)> {
    let unknown = prop_oneof![Just(0xf_0000_u64), Just(0xf_ffff), Just(u64::MAX), Just(0x1_0038)];
    prop_oneof![
        4 => Just((CYCLES, 0)),
        4 => Just((INSTRUCTIONS, 0)),
        4 => (0_u64..12, Just(0)),
        1 => (Just(DTLB_LOAD_MISSES), any::<u64>()),
        2 => (Just(RAW), prop_oneof![Just(0xbad), 0_u64..4]),
        1 => (unknown, Just(0)),
    ]
}

fn value() -> impl Strategy<Value = u64> {
    prop_oneof![
        3 => (1_u64..1000).prop_map(u64::wrapping_neg),
        3 => (1_u64..1_000_000).prop_map(u64::wrapping_neg),
        1 => (1_u64..1 << 48).prop_map(u64::wrapping_neg),
        1 => any::<u64>(),
        1 => Just(0),
    ]
}

/// Returns a strategy for calls, mostly as Linux makes them.
fn call() -> impl Strategy<Value = Step> {
    let config = (set(), prop_oneof![3 => 0_u64..8, 1 => 0_u64..256, 1 => any::<u64>()], event())
        .prop_map(|((base, mask), flags, (event, data))| (2, [base, mask, flags, event, data, 0]));
    let start = (set(), prop_oneof![4 => 0_u64..2, 1 => 0_u64..8], value())
        .prop_map(|((base, mask), flags, value)| (3, [base, mask, flags, value, 0, 0]));
    let stop = (set(), prop_oneof![4 => 0_u64..2, 1 => 0_u64..8])
        .prop_map(|((base, mask), flags)| (4, [base, mask, flags, 0, 0, 0]));
    let other = (prop_oneof![0_u64..2, 5_u64..12, 5_u64..], 0_u64..70)
        .prop_map(|(function, first)| (function, [first; 6]));
    prop_oneof![6 => config, 8 => start, 4 => stop, 1 => other]
        .prop_map(|(function, arguments)| Step::Call(function, arguments))
}

fn step() -> impl Strategy<Value = Step> {
    let freeze = prop_oneof![Just(Freeze::Guest), Just(Freeze::Hybrid), Just(Freeze::Host)];
    let denies = prop_oneof![2 => Just(Denies::Nothing), 1 => Just(Denies::Everything)];
    prop_oneof![
        18 => call(),
        8 => prop_oneof![1_u64..20, 1_u64..2_000_000, 1_u64..1 << 49].prop_map(Step::Run),
        1 => (freeze, denies).prop_map(|(freeze, denies)| Step::SetPolicy(freeze, denies)),
        1 => Just(Step::ReleaseIdle),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn whatever_a_guest_does_its_counters_are_as_the_specification_says(
        steps in proptest::collection::vec(step(), 1..80),
        shape in prop_oneof![3 => Just(SHAPE), 1 => Just(SILENT), 1 => Just(BASE)],
    ) {
        let (mut pmu, host) = pmu(shape);
        let mut reference = Reference::new(shape);
        for step in steps {
            match step {
                Step::Call(function, arguments) => {
                    let Answer { error, value } = pmu.call(function, arguments);
                    match reference.call(function, arguments) {
                        Expected::Exactly(expected, found) => {
                            prop_assert_eq!((error, value), (expected, found), "{} {:x?}", function, arguments);
                        }
                        Expected::OneOf(counters) => {
                            let number = usize::try_from(value).unwrap();
                            prop_assert!(error == SUCCESS && counters.contains(&number), "{:x?}", arguments);
                            reference.is_configured(number, arguments[2]);
                        }
                    }
                }
                Step::Run(counts) => prop_assert_eq!(run(&mut pmu, &host, counts), reference.run(counts)),
                Step::SetPolicy(freeze, denies) => {
                    reference.denied = denies == Denies::Everything;
                    let allowed = if reference.denied { Allowed::These(Vec::new()) } else { Policy::default().allowed };
                    pmu.set_policy(&Policy { allowed, freeze, ..Policy::default() });
                }
                Step::ReleaseIdle => pmu.unit().bank.release_idle(),
            }
            prop_assert!(!pmu.unit().take_interrupt(), "only running raises interrupts");
            let overflows = if shape.overflows { Value(reference.overflows()) } else { Fault };
            prop_assert_eq!(pmu.read(OVERFLOWS), overflows);
            for (csr, counter) in (CYCLE..).zip(&reference.counters[..shape.size()]) {
                let expected = if csr == TIME { NotHandled } else { Value(counter.value) };
                prop_assert_eq!(pmu.read(csr), expected, "{:#x}", csr);
            }
            host.time_passes(Duration::from_millis(20));
        }
    }

    #[test]
    fn no_sequence_of_calls_and_accesses_panics_or_takes_too_many_counters(
        steps in proptest::collection::vec(
            (any::<u64>(), any::<[u64; 6]>(), prop_oneof![0xc00_u32..0xc20, any::<u32>()]), 1..100
        ),
        programmable in 0_usize..=MAX_PROGRAMMABLE,
        overflows in any::<bool>(),
    ) {
        let (mut pmu, host) = pmu(Shape { programmable, overflows });
        for (function, arguments, csr) in steps {
            let [base, mask, flags, event, data, last] = arguments;
            let likely = [base % 40, mask >> (base % 64), flags & 7, event % 11, data, last];
            for (function, arguments) in [(function, arguments), (function % 9, arguments), (function % 9, likely)] {
                let Answer { error, value } = pmu.call(function, arguments);
                prop_assert!(matches!(error, 0 | -2 | -3 | -7 | -8 | -9), "{}", error);
                prop_assert!(error == SUCCESS || value == 0);
            }
            let is_mine = matches!(csr, 0xc00 | 0xc02..=0xc1f | 0xda0);
            prop_assert_eq!(pmu.read(csr) != NotHandled, is_mine);
            prop_assert_eq!(pmu.write(csr, data), if is_mine { Fault } else { NotHandled });
            host.guest_runs(data >> 16, |_| pmu.unit().alarm(false));
            prop_assert!(host.counters() <= programmable + 2);
        }
    }
}
