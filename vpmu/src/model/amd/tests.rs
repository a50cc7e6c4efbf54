//! The model as a guest sees it, by its registers, and compared with a plain implementation of the manual.

use std::time::Duration;

use proptest::prelude::*;

use super::{Amd, Version};
use crate::Outcome::{self, Fault, Handled, NotHandled, Value};
use crate::Switch;
use crate::model::Model;
use crate::model::testing::{counts_in_a_mode, run};
use crate::policy::{Allowed, Freeze, Policy};
use crate::report::State;
use crate::source::Source;
use crate::source::script::Script;
use crate::x86::Vendor;

const K7_SELECT: u32 = 0xc001_0000;
const K7_COUNTER: u32 = 0xc001_0004;
const SELECT: u32 = 0xc001_0200;
const COUNTER: u32 = 0xc001_0201;
const STATUS: u32 = 0xc000_0300;
const CONTROL: u32 = 0xc000_0301;
const STATUS_CLEAR: u32 = 0xc000_0302;
const STATUS_SET: u32 = 0xc000_0303;

/// Instructions, user and kernel, enabled; with and without an interrupt.
const COUNTING: u64 = 0x43_00c0;
const SAMPLING: u64 = 0x53_00c0;
const COUNTING_IN_USER_MODE: u64 = COUNTING & !(1 << 17);
const MASK: u64 = (1 << 48) - 1;

fn pmu(version: Version) -> (Amd<Script>, Script) {
    let host = Script::default();
    (Amd::new(version, Vendor::Amd, host.clone()), host)
}

#[test]
fn k7_and_core_msrs_are_the_same_counters() {
    let (mut pmu, _) = pmu(Version::V2(6));
    for counter in 0..4 {
        assert_eq!(pmu.write(K7_SELECT + counter, 0x1_0000), Handled);
        assert_eq!(pmu.read(SELECT + 2 * counter), Value(0x1_0000));
        assert_eq!(pmu.write(COUNTER + 2 * counter, 5), Handled);
        assert_eq!(pmu.read(K7_COUNTER + counter), Value(5));
        assert_eq!(pmu.read(counter), Value(5), "by RDPMC");
    }
}

#[test]
fn counters_have_48_bits() {
    let (mut pmu, _) = pmu(Version::Core);
    pmu.write(COUNTER, u64::MAX);
    assert_eq!(pmu.read(COUNTER), Value(MASK));
}

#[test]
fn every_version_has_its_registers_and_no_others() {
    let has = |version: Version, msr: u32| match pmu(version).0.read(msr) {
        Value(_) => true,
        Fault => false,
        other => panic!("{msr:#x}: {other:?}"),
    };
    for (version, k7, core, global) in [
        (Version::K7, 4, 0, false),
        (Version::Core, 4, 6, false),
        (Version::V2(6), 4, 6, true),
        (Version::V2(2), 2, 2, true),
    ] {
        for counter in 0..4 {
            assert_eq!(has(version, K7_SELECT + counter), counter < k7);
            assert_eq!(has(version, K7_COUNTER + counter), counter < k7);
        }
        for counter in 0..6 {
            assert_eq!(has(version, SELECT + 2 * counter), counter < core);
            assert_eq!(has(version, COUNTER + 2 * counter), counter < core);
            assert_eq!(has(version, counter), counter < k7.max(core), "by RDPMC");
        }
        for msr in [STATUS, CONTROL, STATUS_CLEAR, STATUS_SET] {
            assert_eq!(has(version, msr), global);
        }
        for foreign in [0xc1, 0x186, 0x38f, 0xc001_0230, 0xc001_1030] {
            assert!(!has(version, foreign), "{foreign:#x}");
        }
        assert_eq!(pmu(version).0.read(0x10), NotHandled);
    }
}

#[test]
fn the_status_is_read_only_and_its_set_and_clear_registers_read_as_zero() {
    let (mut pmu, _) = pmu(Version::V2(6));
    assert_eq!(pmu.write(STATUS, 0), Fault);
    assert_eq!(pmu.write(STATUS_SET, u64::MAX), Handled);
    assert_eq!(pmu.read(STATUS), Value(0x3f));
    assert_eq!(pmu.write(STATUS_CLEAR, 0x5), Handled);
    assert_eq!(pmu.read(STATUS), Value(0x3a));
    assert_eq!((pmu.read(STATUS_CLEAR), pmu.read(STATUS_SET)), (Value(0), Value(0)));
    assert!(!pmu.unit().take_interrupt(), "a bit that software sets is no overflow");
}

#[test]
fn after_reset_global_control_enables_all_counters() {
    let (mut pmu, _) = pmu(Version::V2(5));
    assert_eq!(pmu.read(CONTROL), Value(0x1f));
    pmu.write(CONTROL, u64::MAX);
    assert_eq!(pmu.read(CONTROL), Value(0x1f));
}

#[test]
fn a_counter_that_the_operator_disables_stands_still_until_it_is_enabled_again() {
    let (mut pmu, host) = pmu(Version::V2(2));
    pmu.write(SELECT, COUNTING);
    run(&mut pmu, &host, 100);
    assert!(pmu.unit().set_counter_switch(0, Switch::Off));
    run(&mut pmu, &host, 10);
    // The guest cannot enable it.
    pmu.write(CONTROL, 0);
    pmu.write(CONTROL, 3);
    pmu.write(SELECT, SAMPLING);
    run(&mut pmu, &host, 10);
    assert_eq!(pmu.read(COUNTER), Value(100));
    assert_eq!(pmu.report().counters[0].state, State::Disabled);
    assert!(pmu.unit().set_counter_switch(0, Switch::On));
    run(&mut pmu, &host, 7);
    assert_eq!(pmu.read(COUNTER), Value(107));
    assert_eq!(pmu.report().counters[0].state, State::Counting);
    assert!(!pmu.unit().set_counter_switch(2, Switch::Off), "there are two");
}

#[test]
fn a_starved_counter_that_the_operator_disables_is_not_waited_for() {
    let (mut pmu, host) = pmu(Version::V2(2));
    pmu.write(SELECT, COUNTING);
    host.starve(true);
    pmu.unit().poll();
    assert!(pmu.unit().bank.is_starved() && !pmu.unit().bank.retry_scheduling());
    pmu.unit().set_counter_switch(0, Switch::Off);
    assert!(!pmu.unit().bank.is_starved() && pmu.unit().bank.retry_scheduling());
}

#[test]
fn a_frozen_counter_does_not_move() {
    let (mut pmu, host) = pmu(Version::V2(6));
    pmu.write(SELECT, COUNTING);
    run(&mut pmu, &host, 100);
    assert_eq!(pmu.read(COUNTER), Value(100));
    pmu.write(CONTROL, 0);
    run(&mut pmu, &host, 1000);
    assert_eq!(pmu.read(COUNTER), Value(100));
    pmu.write(CONTROL, 1);
    run(&mut pmu, &host, 7);
    assert_eq!(pmu.read(COUNTER), Value(107));
}

#[test]
fn freezing_thawing_and_reading_need_no_request_to_the_host() {
    let (mut pmu, host) = pmu(Version::V2(6));
    for counter in 0..6 {
        pmu.write(SELECT + 2 * counter, COUNTING);
    }
    let before = host.requests();
    for _ in 0..100 {
        pmu.write(CONTROL, 0);
        run(&mut pmu, &host, 10);
        for counter in 0..6 {
            pmu.read(counter);
        }
        pmu.write(CONTROL, 0x3f);
        run(&mut pmu, &host, 10);
    }
    assert_eq!(host.requests(), before);
    assert_eq!(pmu.read(5), Value(1000));
}

#[test]
fn an_overflow_interrupts_at_the_exact_count() {
    let (mut pmu, host) = pmu(Version::V2(6));
    pmu.write(COUNTER, 1000_u64.wrapping_neg());
    pmu.write(SELECT, SAMPLING);
    assert_eq!(run(&mut pmu, &host, 1_000_000), [1000]);
    assert_eq!(pmu.read(STATUS), Value(1));
    assert_eq!(pmu.read(COUNTER), Value(999_000));
}

#[test]
fn a_counter_without_an_interrupt_shows_its_overflow_in_the_status() {
    let (mut pmu, host) = pmu(Version::V2(6));
    pmu.write(COUNTER, MASK);
    pmu.write(SELECT, COUNTING);
    assert!(run(&mut pmu, &host, 10).is_empty());
    assert_eq!(pmu.read(STATUS), Value(1));
    assert!(!pmu.unit().take_interrupt());
}

#[test]
fn counts_in_the_handler_do_not_bring_the_next_overflow_forward() {
    let (mut pmu, host) = pmu(Version::V2(6));
    pmu.write(COUNTER, 1000_u64.wrapping_neg());
    pmu.write(SELECT, SAMPLING);
    run(&mut pmu, &host, 1000);
    pmu.write(CONTROL, 0);
    assert!(run(&mut pmu, &host, 5000).is_empty());
    pmu.write(COUNTER, 1000_u64.wrapping_neg());
    pmu.write(STATUS_CLEAR, 1);
    pmu.write(CONTROL, 1);
    assert_eq!(run(&mut pmu, &host, 1500), [1000]);
}

#[test]
fn a_short_period_does_not_fire_again_while_the_handler_runs() {
    let (mut pmu, host) = pmu(Version::V2(6));
    pmu.write(COUNTER, 2_u64.wrapping_neg());
    pmu.write(SELECT, SAMPLING);
    run(&mut pmu, &host, 2);
    pmu.write(CONTROL, 0);
    let before = host.requests();
    run(&mut pmu, &host, 100_000);
    assert_eq!(host.requests(), before);
}

#[test]
fn an_alarm_that_expires_early_is_kept_unless_a_single_count_would_be_left() {
    // Linux raises a period of 1 to 2, and the overflow would be late.
    for (period, requests) in [(1001_u64, 1), (1002, 0)] {
        let (mut pmu, host) = pmu(Version::V2(6));
        pmu.write(COUNTER, 1000_u64.wrapping_neg());
        pmu.write(SELECT, SAMPLING);
        let before = host.requests();
        pmu.write(CONTROL, 0);
        pmu.write(COUNTER, period.wrapping_neg());
        pmu.write(CONTROL, 0x3f);
        assert_eq!(host.requests() - before, requests, "{period}");
        assert_eq!(run(&mut pmu, &host, 2000), [period]);
    }
}

#[test]
fn a_constant_period_needs_no_request_to_the_host() {
    let (mut pmu, host) = pmu(Version::V2(6));
    let period = 100_000_u64;
    pmu.write(COUNTER, period.wrapping_neg());
    pmu.write(SELECT, SAMPLING);
    let before = host.requests();
    for _ in 0..100 {
        host.time_passes(Duration::from_micros(100));
        assert_eq!(run(&mut pmu, &host, period), [period]);
        pmu.write(CONTROL, 0);
        pmu.write(COUNTER, period.wrapping_neg());
        pmu.write(CONTROL, 0x3f);
    }
    assert_eq!(host.requests(), before);
}

/// Returns a stopped PMU with six counters that sample the same event. `distances` are the distances of their first
/// overflows.
fn six_that_sample(distances: [u64; 6]) -> (Amd<Script>, Script) {
    let (mut pmu, host) = pmu(Version::V2(6));
    pmu.write(CONTROL, 0);
    for (counter, distance) in (0..).zip(distances) {
        pmu.write(COUNTER + 2 * counter, distance.wrapping_neg());
        pmu.write(SELECT + 2 * counter, SAMPLING);
    }
    (pmu, host)
}

/// Runs the guest until it is interrupted, which must be after `counts`. Its handler, in which `in_handler` counts
/// pass, sets the counters that have overflowed to overflow again after `period`. Returns the number of alarms that
/// expired before the handler.
fn sample(pmu: &mut Amd<Script>, host: &Script, counts: u64, period: u64, in_handler: u64) -> usize {
    host.time_passes(Duration::from_micros(100));
    pmu.write(CONTROL, 0x3f);
    let (mut alarms, mut interrupts) = (0, Vec::new());
    host.guest_runs(counts, |left| {
        pmu.unit().alarm(false);
        alarms += 1;
        if pmu.unit().take_interrupt() {
            interrupts.push(left);
            pmu.unit().bank.alarm_delivered(true);
        }
    });
    assert_eq!(interrupts, [0]);
    pmu.write(CONTROL, 0);
    host.guest_runs(in_handler, |_| pmu.unit().alarm(false));
    let Value(status) = pmu.read(STATUS) else { panic!("it has a status") };
    pmu.write(STATUS_CLEAR, status);
    for counter in (0..6).filter(|counter| status & 1 << counter != 0) {
        pmu.write(COUNTER + 2 * counter, period.wrapping_neg());
    }
    alarms
}

#[test]
fn counters_that_overflow_together_share_an_event_of_the_host_and_need_no_requests() {
    let period = 100_000;
    let (mut pmu, host) = six_that_sample([period; 6]);
    sample(&mut pmu, &host, period, period, 0);
    let before = host.requests();
    for _ in 0..100 {
        assert_eq!(sample(&mut pmu, &host, period, period, 0), 1);
    }
    assert_eq!((host.requests() - before, host.counters()), (0, 1));
    // With counts in the handler, the alarm is set once for each sample.
    for _ in 0..100 {
        assert_eq!(sample(&mut pmu, &host, period, period, 5000), 1);
    }
    assert_eq!(host.requests() - before, 99, "not for the first");
}

#[test]
fn counters_that_overflow_one_after_the_other_need_one_request_for_each_sample() {
    let (mut pmu, host) = six_that_sample([10_000, 25_000, 41_000, 60_000, 70_000, 100_000]);
    let gaps = [10_000, 15_000, 16_000, 19_000, 10_000, 30_000];
    let mut round = |in_handler| {
        let before = host.requests();
        for gap in gaps.into_iter().cycle().take(600) {
            assert_eq!(sample(&mut pmu, &host, gap, 100_000, in_handler), 1);
        }
        host.requests() - before
    };
    round(0);
    assert_eq!(round(0), 600);
    // With counts in the handlers, every alarm would expire early.
    round(5000);
    assert_eq!(round(5000), 600, "no request before the thaw, if the guest is known to freeze first");
}

#[test]
fn overflows_between_an_interrupt_and_the_freeze_belong_to_that_interrupt() {
    let (mut pmu, host) = six_that_sample([10_000, 20_000, 20_010, 20_020, 20_030, 50_000]);
    sample(&mut pmu, &host, 10_000, 1_000_000, 0);
    pmu.write(CONTROL, 0x3f);
    let mut interrupts = Vec::new();
    let mut go_on = |pmu: &mut Amd<Script>, counts| {
        host.guest_runs(counts, |left| {
            pmu.unit().alarm(false);
            if pmu.unit().take_interrupt() {
                interrupts.push(left);
                pmu.unit().bank.alarm_delivered(true);
            }
        });
    };
    // The first hundred instructions of the handler are counted.
    go_on(&mut pmu, 10_100);
    pmu.write(CONTROL, 0);
    assert!(!pmu.unit().take_interrupt());
    assert_eq!(pmu.read(STATUS), Value(0b1_1110));
    pmu.write(STATUS_CLEAR, 0b1_1110);
    // Now the handler no longer freezes. All overflows still interrupt, but one of them 65,536 counts late.
    host.lower_limit();
    pmu.write(COUNTER + 2, 29_980_u64.wrapping_neg());
    pmu.write(CONTROL, 0x3f);
    go_on(&mut pmu, 200_000);
    assert_eq!(interrupts, [100, 200_000 - 29_900, 200_000 - 29_900 - 65_536]);
    assert_eq!(pmu.read(STATUS), Value(0b10_0010));
}

#[test]
fn a_guest_that_is_not_interrupted_or_reads_before_it_freezes_has_its_next_interrupt_in_time() {
    // The guest's APIC may have masked the interrupt.
    for is_interrupted in [false, true] {
        let (mut pmu, host) = six_that_sample([10_000, 20_000, 20_010, 50_000, 50_000, 50_000]);
        sample(&mut pmu, &host, 10_000, 1_000_000, 0);
        pmu.write(CONTROL, 0x3f);
        let mut alarms = Vec::new();
        host.guest_runs(20_000, |left| {
            pmu.unit().alarm(false);
            alarms.push((left, pmu.unit().take_interrupt()));
            pmu.unit().bank.alarm_delivered(is_interrupted);
            if is_interrupted {
                assert!(matches!(pmu.read(COUNTER), Value(_)));
            }
        });
        assert_eq!(alarms, [(10_000, true), (9_990, true)]);
    }
}

#[test]
fn a_guest_that_ignores_an_overflow_is_interrupted_once() {
    let (mut pmu, host) = pmu(Version::V2(6));
    pmu.write(COUNTER, 100_000_u64.wrapping_neg());
    pmu.write(SELECT, SAMPLING);
    host.time_passes(Duration::from_millis(1));
    let mut alarms = 0;
    host.guest_runs(10_000_000, |_| {
        pmu.unit().update_all();
        alarms += 1;
    });
    assert_eq!(alarms, 2, "the alarm repeats once, without an overflow");
}

#[test]
fn counters_that_overflow_together_interrupt_once() {
    let (mut pmu, host) = pmu(Version::V2(6));
    pmu.write(CONTROL, 0);
    for counter in 0..6 {
        pmu.write(COUNTER + 2 * counter, 500_u64.wrapping_neg());
        pmu.write(SELECT + 2 * counter, SAMPLING);
    }
    pmu.write(CONTROL, 0x3f);
    assert_eq!(run(&mut pmu, &host, 1000), [500]);
    assert_eq!(pmu.read(STATUS), Value(0x3f));
}

#[test]
fn a_flood_of_interrupts_meets_the_rate_floor_and_the_operator_is_told() {
    let (mut pmu, host) = pmu(Version::V2(6));
    pmu.write(SELECT, SAMPLING);
    let mut interrupts = 0;
    for _ in 0..5000 {
        pmu.write(COUNTER, MASK);
        interrupts += run(&mut pmu, &host, 100).len();
        host.time_passes(Duration::from_micros(1));
    }
    assert!((1000..1050).contains(&interrupts), "{interrupts}");
    let notices = pmu.unit().bank.take_notices();
    assert_eq!(notices.len(), 1);
    assert!(notices[0].to_string().contains("rate floor"), "{}", notices[0]);
}

#[test]
fn overflows_of_several_counters_are_no_flood_however_close_they_are() {
    let (mut pmu, host) = six_that_sample([3000, 6000, 9000, 12_000, 15_000, 18_000]);
    for _ in 0..1200 {
        pmu.write(CONTROL, 0x3f);
        assert_eq!(run(&mut pmu, &host, 3000), [3000]);
        pmu.write(CONTROL, 0);
        let Value(status) = pmu.read(STATUS) else { panic!("it has a status") };
        pmu.write(STATUS_CLEAR, status);
        pmu.write(COUNTER + 2 * status.ilog2(), 18_000_u64.wrapping_neg());
        host.time_passes(Duration::from_micros(3));
    }
    assert_eq!(pmu.unit().bank.take_notices(), []);
}

#[test]
fn interrupts_that_come_late_are_no_flood() {
    const PERIOD: u64 = 10_000;
    /// Counts from an overflow to its interrupt. The kernel takes them off the next period.
    const LATE: u64 = 3000;
    let (mut pmu, host) = pmu(Version::V2(6));
    pmu.write(SELECT, SAMPLING);
    pmu.write(COUNTER, PERIOD.wrapping_neg());
    let mut distance = PERIOD;
    for _ in 0..1200 {
        host.guest_runs(distance + LATE, |_| {});
        pmu.unit().alarm(false);
        assert!(pmu.unit().take_interrupt());
        pmu.write(CONTROL, 0);
        assert_eq!(pmu.read(COUNTER), Value(LATE));
        pmu.write(STATUS_CLEAR, 1);
        distance = PERIOD - LATE;
        pmu.write(COUNTER, distance.wrapping_neg());
        pmu.write(CONTROL, 0x3f);
        host.time_passes(Duration::from_micros(10));
    }
    assert_eq!(pmu.unit().bank.take_notices(), []);
}

#[test]
fn an_alarm_that_entries_have_brought_nearer_is_set_again() {
    const PERIOD: u64 = 10_000;
    const ENTRIES: u64 = 7;
    let (mut pmu, host) = pmu(Version::V2(6));
    pmu.write(SELECT, SAMPLING);
    pmu.write(COUNTER, PERIOD.wrapping_neg());
    for _ in 0..100 {
        // The host's alarm is that of the last period, or was set for this one; it comes too soon in any case.
        host.counts_entries(ENTRIES);
        assert_eq!(run(&mut pmu, &host, PERIOD - 1), Vec::<u64>::new());
        assert_eq!(run(&mut pmu, &host, 1), [1], "the overflow is at the right count");
        pmu.write(CONTROL, 0);
        pmu.write(STATUS_CLEAR, 1);
        pmu.write(COUNTER, PERIOD.wrapping_neg());
        pmu.write(CONTROL, 0x3f);
        host.time_passes(Duration::from_micros(10));
    }
}

#[test]
fn an_event_that_the_host_refuses_stands_still_and_the_operator_is_told_once() {
    const BAD: u64 = COUNTING & !0xffff | 0xbad;
    let (mut pmu, host) = pmu(Version::V2(6));
    for _ in 0..100 {
        pmu.write(SELECT, BAD);
        pmu.write(SELECT, 0);
    }
    run(&mut pmu, &host, 100);
    assert_eq!(pmu.read(COUNTER), Value(0));
    let notices = pmu.unit().bank.take_notices();
    assert_eq!(notices.len(), 1, "one notice");
    assert!(notices[0].to_string().contains("it does not exist"), "{}", notices[0]);
    pmu.write(SELECT, COUNTING);
    pmu.write(SELECT, BAD);
    assert_eq!(
        pmu.unit().bank.take_notices().len(),
        1,
        "another notice after the counter has counted something else"
    );
}

#[test]
fn a_guest_that_asks_for_one_impossible_event_after_the_other_does_not_flood_the_operator() {
    /// The refused event in all modes, and in user mode only.
    const BAD: [u64; 2] = [COUNTING & !0xffff | 0xbad, COUNTING & !0x2_ffff | 0xbad];
    let (mut pmu, host) = pmu(Version::V2(6));
    for _ in 0..50 {
        for select in BAD {
            pmu.write(SELECT, select);
        }
    }
    assert_eq!(pmu.unit().bank.take_notices().len(), 16 + 1, "16, and one that says that more are dropped");
    host.time_passes(Duration::from_secs(10));
    pmu.write(SELECT, BAD[0]);
    assert!(pmu.unit().bank.take_notices()[0].to_string().contains("it does not exist"));
}

#[test]
fn an_event_that_a_guest_has_stopped_using_is_released() {
    let (mut pmu, host) = pmu(Version::V2(6));
    pmu.write(SELECT, COUNTING);
    pmu.write(COUNTER + 2, 5);
    pmu.write(SELECT + 2, COUNTING_IN_USER_MODE);
    run(&mut pmu, &host, 100);
    pmu.write(SELECT, COUNTING & !(1 << 22));
    pmu.unit().bank.release_idle();
    assert_eq!(host.counters(), 2, "the guest may use it again at once");
    pmu.unit().bank.release_idle();
    assert_eq!(host.counters(), 1);
    run(&mut pmu, &host, 100);
    assert_eq!((pmu.read(COUNTER), pmu.read(COUNTER + 2)), (Value(100), Value(205)));
    pmu.write(SELECT, COUNTING);
    run(&mut pmu, &host, 100);
    assert_eq!((pmu.read(COUNTER), pmu.read(COUNTER + 2)), (Value(200), Value(305)));
}

#[test]
fn starvation_is_reported_with_its_length() {
    let (mut pmu, host) = pmu(Version::V2(6));
    pmu.write(SELECT, COUNTING);
    host.starve(true);
    pmu.read(COUNTER);
    host.time_passes(Duration::from_millis(30));
    host.starve(false);
    pmu.read(COUNTER);
    pmu.read(COUNTER);
    let told: Vec<String> = pmu.unit().bank.take_notices().iter().map(ToString::to_string).collect();
    assert_eq!(told.len(), 2, "{told:?}");
    assert!(told[0].contains("counter 0 (rc0:uk) is starved"), "{told:?}");
    assert!(told[1].contains("30.000ms"), "{told:?}");
}

/// The PMU as the manual describes it.
#[derive(Default)]
struct Reference {
    selects: [u64; 6],
    values: [u64; 6],
    control: u64,
    status: u64,
    denied: bool,
}

impl Reference {
    fn new() -> Self {
        Self { control: 0x3f, ..Self::default() }
    }

    fn counts(&self, counter: usize) -> bool {
        let select = self.selects[counter];
        !self.denied
            && matches!(select >> 40 & 3, 0 | 3)
            && select & 1 << 22 != 0
            && counts_in_a_mode(select)
            && self.control & 1 << counter != 0
    }

    /// Runs for `counts` counts. Returns the counts at which there is an interrupt.
    fn run(&mut self, counts: u64) -> Vec<u64> {
        let mut interrupts = Vec::new();
        for counter in 0..6 {
            if !self.counts(counter) {
                continue;
            }
            let until = MASK + 1 - self.values[counter];
            if counts >= until {
                self.status |= 1 << counter;
                if self.selects[counter] & 1 << 20 != 0 {
                    interrupts.push(until);
                }
            }
            self.values[counter] = (self.values[counter] + counts) & MASK;
        }
        interrupts.sort_unstable();
        interrupts.dedup();
        interrupts
    }

    fn write(&mut self, msr: u32, value: u64) {
        let core = usize::try_from(msr.wrapping_sub(SELECT)).unwrap();
        match msr {
            K7_SELECT..K7_COUNTER => self.selects[(msr - K7_SELECT) as usize] = value & 0x30f_ffd7_ffff,
            K7_COUNTER..=0xc001_0007 => self.values[(msr - K7_COUNTER) as usize] = value & MASK,
            SELECT..=0xc001_020b if core.is_multiple_of(2) => {
                self.selects[core / 2] = value & 0x30f_ffd7_ffff;
            }
            SELECT..=0xc001_020b => self.values[core / 2] = value & MASK,
            CONTROL => self.control = value & 0x3f,
            STATUS_CLEAR => self.status &= !value,
            STATUS_SET => self.status |= value & 0x3f,
            _ => {}
        }
    }

    fn read(&self, msr: u32) -> Outcome {
        let core = usize::try_from(msr.wrapping_sub(SELECT)).unwrap();
        Value(match msr {
            0..=5 => self.values[msr as usize],
            K7_SELECT..K7_COUNTER => self.selects[(msr - K7_SELECT) as usize],
            K7_COUNTER..=0xc001_0007 => self.values[(msr - K7_COUNTER) as usize],
            SELECT..=0xc001_020b if core.is_multiple_of(2) => self.selects[core / 2],
            SELECT..=0xc001_020b => self.values[core / 2],
            STATUS => self.status,
            CONTROL => self.control,
            _ => 0,
        })
    }
}

#[derive(Debug, Clone)]
enum Step {
    Write(u32, u64),
    Read(u32),
    Run(u64),
    SetPolicy(Freeze, Denies),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Denies {
    Nothing,
    Everything,
}

fn register() -> impl Strategy<Value = u32> {
    prop_oneof![0xc001_0000_u32..0xc001_0008, 0xc001_0200_u32..0xc001_020c, 0xc000_0301_u32..0xc000_0304]
}

fn value() -> impl Strategy<Value = u64> {
    prop_oneof![
        Just(0),
        Just(u64::MAX),
        Just(SAMPLING),
        Just(COUNTING),
        any::<u64>(),
        (1_u64..1000).prop_map(u64::wrapping_neg),
        (1_u64..1_000_000).prop_map(|distance| MASK + 1 - distance),
        (0_u32..64).prop_map(|bit| 1 << bit),
        any::<u64>().prop_map(|bits| bits & 0x30f_ffd7_ffff | SAMPLING),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    // Counters often have the same event.
    let select =
        prop_oneof![4 => Just(SAMPLING), 2 => Just(COUNTING), 1 => Just(COUNTING_IN_USER_MODE), 1 => Just(0)];
    prop_oneof![
        4 => (register(), value()).prop_map(|(msr, value)| Step::Write(msr, value)),
        2 => (0_u32..6, select).prop_map(|(counter, select)| Step::Write(SELECT + 2 * counter, select)),
        2 => prop_oneof![register(), 0_u32..6, Just(STATUS)].prop_map(Step::Read),
        3 => prop_oneof![1_u64..20, 1_u64..2_000_000, 1_u64..1 << 47].prop_map(Step::Run),
        1 => (
            prop_oneof![Just(Freeze::Guest), Just(Freeze::Hybrid), Just(Freeze::Host)],
            prop_oneof![2 => Just(Denies::Nothing), 1 => Just(Denies::Everything)],
        ).prop_map(|(freeze, denies)| Step::SetPolicy(freeze, denies)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn whatever_a_guest_does_its_registers_are_as_the_manual_says(steps in proptest::collection::vec(step(), 1..60)) {
        let (mut pmu, host) = pmu(Version::V2(6));
        let mut reference = Reference::new();
        for step in steps {
            match step {
                Step::Write(msr, value) => {
                    // The Merge event counts nothing.
                    let value = if value & 0xf_0000_00ff == 0xf_0000_00ff { value & !0xff } else { value };
                    prop_assert_eq!(pmu.write(msr, value), Handled);
                    reference.write(msr, value);
                }
                Step::Read(msr) => prop_assert_eq!(pmu.read(msr), reference.read(msr), "{:#x}", msr),
                Step::Run(counts) => prop_assert_eq!(run(&mut pmu, &host, counts), reference.run(counts)),
                Step::SetPolicy(freeze, denies) => {
                    reference.denied = denies == Denies::Everything;
                    let allowed = if reference.denied { Allowed::These(Vec::new()) } else { Policy::default().allowed };
                    pmu.set_policy(&Policy { allowed, freeze, ..Policy::default() });
                }
            }
            prop_assert!(!pmu.unit().take_interrupt(), "only running raises interrupts");
            host.time_passes(Duration::from_millis(20));
        }
        for msr in (0..6).chain([STATUS]) {
            prop_assert_eq!(pmu.read(msr), reference.read(msr), "{:#x}", msr);
        }
    }

    #[test]
    fn no_sequence_of_accesses_panics_or_takes_too_many_counters(
        steps in proptest::collection::vec((any::<bool>(), prop_oneof![register(), any::<u32>()], any::<u64>()), 1..100),
        version in prop_oneof![Just(Version::K7), Just(Version::Core), (1_usize..7).prop_map(Version::V2)],
    ) {
        let (mut pmu, host) = pmu(version);
        for (write, msr, value) in steps {
            let outcome = if write { pmu.write(msr, value) } else { pmu.read(msr) };
            prop_assert_eq!(outcome == NotHandled, !(crate::x86::is_pmu_msr(msr) || crate::x86::is_rdpmc(msr)));
            host.guest_runs(value >> 16, |_| pmu.unit().alarm(false));
            prop_assert!(host.counters() <= version.counters());
        }
    }
}
