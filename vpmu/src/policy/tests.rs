//! Which events a policy allows, and that a guest cannot get around it whatever it does.

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::Outcome::Value;
use crate::model::testing::run;
use crate::model::{Model, amd, intel};
use crate::source::script::Script;

const VENDORS: [Vendor; 2] = [Vendor::Amd, Vendor::Intel];

const SELECT: u32 = 0xc001_0200;
const COUNTER: u32 = 0xc001_0201;
const STATUS: u32 = 0xc000_0300;
const CONTROL: u32 = 0xc000_0301;
const STATUS_CLEAR: u32 = 0xc000_0302;
/// Instructions, user and kernel, enabled; with and without an interrupt.
const COUNTING: u64 = 0x43_00c0;
const SAMPLING: u64 = 0x53_00c0;
const MASK: u64 = (1 << 48) - 1;

fn of_tier(tier: Tier) -> Policy {
    Policy { allowed: Allowed::Tier(tier), ..Policy::default() }
}

fn of_events(events: &[&str]) -> Policy {
    let rules = events.iter().map(|event| event.parse().unwrap()).collect();
    Policy { allowed: Allowed::These(rules), ..Policy::default() }
}

fn with_min_period(period: u64) -> Policy {
    Policy { min_period: NonZeroU64::new(period).unwrap(), ..Policy::default() }
}

fn with_limit(per_second: u32) -> Policy {
    Policy { max_interrupts_per_second: NonZeroU32::new(per_second), ..Policy::default() }
}

fn amd(policy: &Policy) -> (amd::Amd<Script>, Script) {
    let host = Script::default();
    let mut pmu = amd::Amd::new(amd::Version::V2(6), Vendor::Amd, host.clone());
    pmu.set_policy(policy);
    (pmu, host)
}

fn intel(policy: &Policy) -> (intel::Intel<Script>, Script) {
    let host = Script::default();
    let shape = intel::Shape { version: intel::Version::V5, general: 4, fixed: 3, absent: 0 };
    let mut pmu = intel::Intel::new(shape, Vendor::Intel, host.clone());
    pmu.set_policy(policy);
    (pmu, host)
}

#[test]
fn events_have_the_tiers_that_clouds_sell() {
    use Tier::{Architectural, Enhanced, Standard};
    for (vendor, code, tier) in [
        (Vendor::Intel, 0x003c, Architectural),
        (Vendor::Intel, 0x0100_00c4, Architectural), // A counter mask does not change the event.
        (Vendor::Intel, 0x412e, Enhanced),           // Last-level cache misses.
        (Vendor::Intel, 0x01d1, Standard),           // Loads that hit the first-level cache.
        (Vendor::Intel, 0x02d1, Standard),           // Loads that hit the second-level cache.
        (Vendor::Intel, 0x04d1, Enhanced),           // Loads that hit the third-level cache.
        (Vendor::Intel, 0x06d1, Enhanced),
        (Vendor::Intel, 0x01b7, Enhanced), // Responses from outside of the core.
        (Vendor::Intel, 0x3f24, Standard), // Requests to the second-level cache.
        (Vendor::Intel, 0x01ff, Enhanced), // Undocumented.
        (Vendor::Amd, 0x0076, Architectural),
        (Vendor::Amd, 0x1_0000_0120, Architectural),
        (Vendor::Amd, 0x0964, Standard), // Second-level cache misses.
        (Vendor::Amd, 0x0143, Standard), // Fills from the second-level cache.
        (Vendor::Amd, 0x0843, Enhanced), // Fills from memory.
        (Vendor::Amd, 0xff72, Enhanced),
        (Vendor::Amd, 0x1_0000_018e, Standard),
        (Vendor::Amd, 0x4_0000_00e0, Enhanced), // The northbridge of older families.
    ] {
        assert_eq!(Tier::of(vendor, code), tier, "{vendor:?} {code:#x}");
    }
}

#[test]
fn a_rule_matches_events_by_name_by_encoding_or_by_the_bits_of_a_mask() {
    let matches = |rule: &str, vendor, code| rule.parse::<Rule>().unwrap().matches(vendor, code);
    assert!(matches("branches", Vendor::Intel, 0x00c4) && matches("branches", Vendor::Amd, 0x00c2));
    assert!(!matches("branches", Vendor::Intel, 0x00c2));
    assert!(matches("r01c0", Vendor::Amd, 0x01c0) && !matches("r01c0", Vendor::Amd, 0x00c0));
    assert!(matches("r01c0", Vendor::Amd, 0x0200_01c0), "with a counter mask");
    assert!(matches("r00c0/00ff", Vendor::Amd, 0x55c0));
    assert!(!matches("r00c0/ff0000ff", Vendor::Amd, 0x0200_00c0));
    let unknown = |vendor| of_events(&["bus-cycles", "r40"]).unknown_event_names(vendor).count();
    assert_eq!((unknown(Vendor::Amd), unknown(Vendor::Intel)), (1, 0));
}

#[test]
fn a_policy_and_its_changes_can_be_serialized() {
    let policy = Policy { freeze: Freeze::Hybrid, ..of_events(&["cycles", "r00c0/00ff"]) };
    let text = serde_json::to_string(&policy).unwrap();
    assert!(text.contains(r#"{"these":["cycles","r00c0/00ff"]}"#), "{text}");
    assert_eq!(serde_json::from_str::<Policy>(&text).unwrap(), policy);
    let told = serde_json::from_str::<Policy>(&text.replace("cycles", "cyclse")).unwrap_err().to_string();
    assert!(told.contains("did you mean `cycles`?"), "{told}");
    let none = Change { from: Base::Present, settings: vec![Setting::MaxInterruptsPerSecond(None)] };
    let read: Change = serde_json::from_str(&serde_json::to_string(&none).unwrap()).unwrap();
    assert_eq!(read, none);
    assert_eq!(with_limit(5).changed_by(&read), Policy::default());
    let from_default = Change { from: Base::Default, settings: vec![Setting::Freeze(Freeze::Host)] };
    assert_eq!(policy.changed_by(&from_default), Policy { freeze: Freeze::Host, ..Policy::default() });
}

#[test]
fn a_denied_event_stands_still_and_is_reported_once() {
    let (mut pmu, host) = amd(&of_tier(Tier::Architectural));
    pmu.write(SELECT, COUNTING);
    for _ in 0..3 {
        pmu.write(SELECT + 2, COUNTING & !0xffff | 0x40);
        run(&mut pmu, &host, 100);
        pmu.write(SELECT + 2, 0);
    }
    assert_eq!((pmu.read(COUNTER), pmu.read(COUNTER + 2)), (Value(300), Value(0)));
    let told: Vec<String> = pmu.unit().bank.take_notices().iter().map(ToString::to_string).collect();
    assert_eq!(told, ["counter 1 stands still: the policy denies r40:uk (L1-dcache-loads)"]);
}

#[test]
fn a_fixed_counter_is_denied_too() {
    const FIXED: u32 = 0x309;
    const FIXED_CONTROL: u32 = 0x38d;
    const GLOBAL_CONTROL: u32 = 0x38f;
    let (mut pmu, host) = intel(&of_events(&["cycles"]));
    pmu.write(FIXED_CONTROL, 0x333);
    pmu.write(GLOBAL_CONTROL, 7 << 32);
    run(&mut pmu, &host, 100);
    let mut counts = || [0, 1, 2].map(|counter| pmu.read(FIXED + counter));
    assert_eq!(counts(), [Value(0), Value(100), Value(0)]);
    pmu.set_policy(&of_events(&["instructions"]));
    run(&mut pmu, &host, 10);
    let mut counts = || [0, 1, 2].map(|counter| pmu.read(FIXED + counter));
    assert_eq!(counts(), [Value(10), Value(100), Value(0)]);
    let told: Vec<String> = pmu.unit().bank.take_notices().iter().map(ToString::to_string).collect();
    assert!(told[0].ends_with("the policy denies rc0:uk (instructions)"), "{told:?}");
}

#[test]
fn an_event_that_is_denied_later_stops_and_goes_on_when_it_is_allowed_again() {
    let (mut pmu, host) = amd(&Policy::default());
    pmu.write(SELECT, COUNTING);
    run(&mut pmu, &host, 100);
    pmu.set_policy(&of_events(&[]));
    run(&mut pmu, &host, 1000);
    assert_eq!((pmu.read(COUNTER), host.counters()), (Value(100), 0));
    pmu.set_policy(&Policy::default());
    run(&mut pmu, &host, 7);
    assert_eq!(pmu.read(COUNTER), Value(107));
}

#[test]
fn with_hybrid_freeze_only_cycles_count_in_the_host() {
    let scopes = |freeze, codes: [u64; 4], vendor| {
        let policy = Policy { freeze, ..Policy::default() };
        codes.map(|code| policy.scope(vendor, code))
    };
    let (guest, thread) = (Scope::Guest, Scope::Thread);
    let amd = [0x0076, 0x1_0000_0120, 0x00c0, 0x003c];
    assert_eq!(scopes(Freeze::Guest, amd, Vendor::Amd), [guest; 4]);
    assert_eq!(scopes(Freeze::Hybrid, amd, Vendor::Amd), [thread, thread, guest, guest]);
    assert_eq!(scopes(Freeze::Host, amd, Vendor::Amd), [thread; 4]);
    let intel = [0x003c, 0x0300, 0x013c, 0x00c0];
    assert_eq!(scopes(Freeze::Hybrid, intel, Vendor::Intel), [thread, thread, thread, guest]);
}

#[test]
fn a_period_below_the_minimum_is_raised_to_it_and_counts_stay_right() {
    let (mut pmu, host) = amd(&with_min_period(1000));
    pmu.write(COUNTER, 100_u64.wrapping_neg());
    pmu.write(SELECT, SAMPLING);
    for _ in 0..5 {
        assert_eq!(run(&mut pmu, &host, 1000), [1000]);
        assert_eq!(pmu.read(COUNTER), Value(900), "it has not stood still");
        pmu.write(COUNTER, 100_u64.wrapping_neg());
        pmu.write(STATUS_CLEAR, 1);
    }
    assert_eq!(pmu.report().statistics.clamps, 5);
    pmu.write(COUNTER, 2000_u64.wrapping_neg());
    assert_eq!(run(&mut pmu, &host, 2000), [2000]);
    assert_eq!(pmu.report().statistics.clamps, 5, "that is long enough");
}

#[test]
fn reading_a_counter_does_not_bring_its_overflow_forward() {
    let (mut pmu, host) = amd(&with_min_period(1000));
    pmu.write(COUNTER, 100_u64.wrapping_neg());
    pmu.write(SELECT, SAMPLING);
    run(&mut pmu, &host, 150);
    assert_eq!((pmu.read(COUNTER), pmu.read(STATUS)), (Value(50), Value(0)));
    assert!(!pmu.unit().take_interrupt());
    assert_eq!(run(&mut pmu, &host, 1000), [850]);
    assert_eq!(pmu.read(STATUS), Value(1));
}

#[test]
fn an_interrupt_over_the_limit_waits_and_its_overflow_is_in_the_status() {
    let (mut pmu, host) = amd(&with_limit(10));
    pmu.write(SELECT, SAMPLING);
    let mut sample = |at: u64| {
        pmu.write(COUNTER, 100_u64.wrapping_neg());
        assert_eq!(run(&mut pmu, &host, 100).len(), usize::from(at == 0), "at {at}");
    };
    sample(0);
    sample(1);
    assert_eq!(pmu.read(STATUS), Value(1));
    assert_eq!(pmu.unit().throttled_until(), Some(Duration::from_millis(100)));
    host.time_passes(Duration::from_millis(99));
    assert!(!pmu.unit().take_interrupt());
    host.time_passes(Duration::from_millis(1));
    assert!(pmu.unit().take_interrupt());
    assert!(!pmu.unit().take_interrupt(), "it comes once");
    let statistics = pmu.report().statistics;
    assert_eq!((statistics.interrupts, statistics.withheld), (2, 1));
}

#[test]
fn a_withheld_interrupt_is_dropped_once_the_guest_has_handled_the_overflow() {
    for (register, value) in [(STATUS_CLEAR, 1), (COUNTER, 0), (SELECT, COUNTING)] {
        let (mut pmu, host) = amd(&with_limit(1));
        pmu.write(SELECT, SAMPLING);
        for _ in 0..2 {
            pmu.write(COUNTER, 100_u64.wrapping_neg());
            run(&mut pmu, &host, 100);
        }
        assert!(pmu.unit().throttled_until().is_some());
        pmu.write(register, value);
        host.time_passes(Duration::from_secs(2));
        assert!(!pmu.unit().take_interrupt(), "{register:#x}");
    }
}

#[test]
fn a_withheld_interrupt_is_kept_when_the_policy_changes() {
    for before in [with_limit(1), with_min_period(1000)] {
        let (mut pmu, host) = amd(&before);
        pmu.write(SELECT, SAMPLING);
        for _ in 0..2 {
            pmu.write(COUNTER, 100_u64.wrapping_neg());
            run(&mut pmu, &host, 150);
        }
        assert_eq!(pmu.read(COUNTER), Value(50));
        pmu.set_policy(&Policy { freeze: Freeze::Host, ..before.clone() });
        host.time_passes(Duration::from_secs(1));
        let interrupts = run(&mut pmu, &host, 1000).len() + usize::from(pmu.unit().take_interrupt());
        assert_eq!((interrupts, pmu.read(STATUS)), (1, Value(1)), "{before:?}");
    }
}

#[test]
fn a_withheld_interrupt_freezes_no_counters() {
    const GENERAL: u32 = 0xc1;
    let (mut pmu, host) = intel(&with_limit(1));
    pmu.write(crate::x86::DEBUGCTL, crate::x86::FREEZE_PERFMON_ON_PMI);
    pmu.write(0x186, SAMPLING);
    pmu.write(GENERAL, 100_u64.wrapping_neg());
    assert_eq!(run(&mut pmu, &host, 150), [100]);
    assert_eq!(pmu.read(GENERAL), Value(0), "frozen");
    pmu.write(0x390, 1 << 59 | 1);
    pmu.write(GENERAL, 100_u64.wrapping_neg());
    assert!(run(&mut pmu, &host, 150).is_empty());
    assert_eq!(pmu.read(GENERAL), Value(50));
    host.time_passes(Duration::from_secs(1));
    assert!(pmu.unit().take_interrupt() && pmu.unit().is_frozen());
}

/// What a hostile guest does to its first two counters.
#[derive(Debug, Clone)]
enum Step {
    Write(u32, u64),
    Read(u32),
    Run(u64),
    Wait(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let select =
        prop_oneof![Just(SAMPLING), Just(COUNTING), Just(0), Just(SAMPLING & !0x2_0000), any::<u64>()];
    let value = prop_oneof![Just(MASK), (1_u64..3000).prop_map(|left| MASK + 1 - left), any::<u64>()];
    prop_oneof![
        1 => (0_u32..2, select).prop_map(|(counter, value)| Step::Write(SELECT + 2 * counter, value)),
        3 => (0_u32..2, value).prop_map(|(counter, value)| Step::Write(COUNTER + 2 * counter, value)),
        1 => (prop_oneof![Just(CONTROL), Just(STATUS_CLEAR)], 0_u64..64).prop_map(|(msr, value)| Step::Write(msr, value)),
        1 => prop_oneof![Just(COUNTER), Just(COUNTER + 2), Just(STATUS)].prop_map(Step::Read),
        3 => (1_u64..3000).prop_map(Step::Run),
        1 => (0_u64..300_000_000).prop_map(Step::Wait),
    ]
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    proptest::collection::vec(step(), 1..120)
}

/// Makes the guest do these steps. Returns the counts and times at which it is interrupted.
fn run_steps(pmu: &mut amd::Amd<Script>, host: &Script, steps: &[Step]) -> Vec<(u64, Duration)> {
    let (mut counts, mut now) = (0, Duration::ZERO);
    let mut interrupts = Vec::new();
    for step in steps {
        match *step {
            Step::Write(msr, value) => {
                pmu.write(msr, value);
            }
            Step::Read(msr) => {
                pmu.read(msr);
            }
            Step::Run(more) => {
                interrupts.extend(run(pmu, host, more).into_iter().map(|at| (counts + at, now)));
                counts += more;
            }
            Step::Wait(nanoseconds) => {
                now += Duration::from_nanos(nanoseconds);
                host.time_passes(Duration::from_nanos(nanoseconds));
            }
        }
        if pmu.unit().take_interrupt() {
            interrupts.push((counts, now));
        }
    }
    interrupts
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn a_higher_tier_has_what_a_lower_one_has(code in any::<u64>(), short in 0_u64..0x1_0000) {
        for (vendor, code) in VENDORS.into_iter().flat_map(|vendor| [(vendor, code), (vendor, short)]) {
            let allows = |tier| of_tier(tier).allows(vendor, code);
            prop_assert!(!allows(Tier::Architectural) || allows(Tier::Standard));
            prop_assert!(allows(Tier::Enhanced));
        }
    }

    #[test]
    fn every_text_is_a_rule_or_its_error_quotes_it(text in "[a-zA-Z0-9/_-]{0,12}|r[0-9a-f]{1,10}(/[0-9a-f]{1,10})?") {
        match text.parse::<Rule>() {
            Ok(rule) => prop_assert_eq!(rule.to_string().parse::<Rule>(), Ok(rule)),
            Err(error) => prop_assert!(error.to_string().contains(&text)),
        }
    }

    #[test]
    fn whatever_a_guest_does_a_denied_event_does_not_move(steps in steps()) {
        let (mut pmu, host) = amd(&of_events(&[]));
        prop_assert_eq!(run_steps(&mut pmu, &host, &steps), []);
        let written = |counter: u32| steps.iter().rev().find_map(|step| match step {
            Step::Write(msr, value) if *msr == COUNTER + 2 * counter => Some(value & MASK),
            _ => None,
        });
        for counter in 0..2 {
            prop_assert_eq!(pmu.read(COUNTER + 2 * counter), Value(written(counter).unwrap_or(0)));
        }
        prop_assert_eq!(host.counters(), 0);
    }

    #[test]
    fn whatever_a_guest_does_its_counter_keeps_the_minimum_period(steps in steps(), period in 1_u64..2000) {
        let (mut pmu, host) = amd(&with_min_period(period));
        // The minimum period is of one counter: overflows of two counters may come at any distance.
        let steps: Vec<_> = steps.into_iter().filter(|step| !matches!(step, Step::Write(msr, _) if *msr == SELECT + 2)).collect();
        let interrupts = run_steps(&mut pmu, &host, &steps);
        for pair in interrupts.windows(2) {
            prop_assert!(pair[1].0 - pair[0].0 >= period, "{:?}", interrupts);
        }
    }

    #[test]
    fn whatever_a_guest_does_its_interrupts_keep_the_limit_and_come_in_the_end(steps in steps(), cap in 1_u32..60) {
        let (mut pmu, host) = amd(&with_limit(cap));
        let interrupts = run_steps(&mut pmu, &host, &steps);
        let at_once = u128::from((cap / 10).max(1));
        for (number, first) in interrupts.iter().enumerate() {
            for (further, last) in interrupts[number..].iter().enumerate() {
                let window = last.1.saturating_sub(first.1);
                let share = window.as_nanos() * u128::from(cap) / 1_000_000_000;
                prop_assert!(further as u128 <= share + at_once, "{:?}", interrupts);
            }
        }
        if let Some(until) = pmu.unit().throttled_until() {
            let left = until.saturating_sub(pmu.unit().bank.now());
            host.time_passes(left);
            prop_assert!(pmu.unit().take_interrupt());
        }
    }

    #[test]
    fn limits_on_interrupts_do_not_change_counts(steps in steps(), period in 1_u64..5000, cap in 1_u32..60) {
        let policy = Policy { max_interrupts_per_second: NonZeroU32::new(cap), ..with_min_period(period) };
        let ((mut limited, its_host), (mut free, host)) = (amd(&policy), amd(&Policy::default()));
        for step in steps {
            run_steps(&mut limited, &its_host, std::slice::from_ref(&step));
            run_steps(&mut free, &host, &[step]);
            for counter in [COUNTER, COUNTER + 2] {
                prop_assert_eq!(limited.read(counter), free.read(counter));
            }
        }
    }
}
