//! The model as a guest sees it, by SBI calls and CSRs, used as Linux does (`drivers/perf/riscv_pmu_sbi.c`).

mod reference;

use std::num::NonZeroU32;
use std::time::Duration;

use super::*;
use crate::Outcome::{Fault, NotHandled, Value};
use crate::Switch;
use crate::event::Scope;
use crate::model::testing::run;
use crate::policy::{Allowed, Freeze, Tier};
use crate::source::FAR;
use crate::source::script::{REFUSED, Script, UNKNOWN};

const SUCCESS: i64 = 0;
const NOT_SUPPORTED: i64 = -2;
const INVALID_PARAM: i64 = -3;
const ALREADY_STARTED: i64 = -7;
const ALREADY_STOPPED: i64 = -8;
const NO_SHMEM: i64 = -9;

const SKIP_MATCH: u64 = 1 << 0;
const CLEAR_VALUE: u64 = 1 << 1;
const AUTO_START: u64 = 1 << 2;
const VIRTUAL_MODES: u64 = 1 << 3 | 1 << 4;
const NOT_IN_USER_MODE: u64 = 1 << 5;
const NOT_IN_THE_KERNEL: u64 = 1 << 6;
const NOT_IN_M_MODE: u64 = 1 << 7;
const SET_INIT_VALUE: u64 = 1;
const RESET: u64 = 1;

const CYCLES: u64 = 1;
const INSTRUCTIONS: u64 = 2;
const BRANCHES: u64 = 5;
const BUS_CYCLES: u64 = 7;
const DTLB_LOAD_MISSES: u64 = 0x1_0019;
const RAW: u64 = 0x2_0000;

/// Six programmable counters, which is a common number.
const SHAPE: Shape = Shape { programmable: 6, overflows: true };
const SILENT: Shape = Shape { overflows: false, ..SHAPE };
/// No programmable counters.
const BASE: Shape = Shape { programmable: 0, overflows: false };
/// All counters of [`SHAPE`].
const ALL: u64 = 0b1_1111_1101;

fn pmu(shape: Shape) -> (Riscv<Script>, Script) {
    let host = Script::default();
    (Riscv::new(shape, host.clone()), host)
}

/// What a guest's kernel does. Calls return the SBI's error and value.
trait GuestKernel {
    fn sbi_call(&mut self, function: u64, arguments: &[u64]) -> (i64, u64);

    fn config(&mut self, mask: u64, flags: u64, event: u64) -> (i64, u64) {
        self.sbi_call(sbi::CONFIG_MATCHING, &[0, mask, flags, event, 0])
    }

    fn starts(&mut self, counter: u64, value: u64) -> i64 {
        self.sbi_call(sbi::START, &[counter, 1, SET_INIT_VALUE, value]).0
    }

    fn stops(&mut self, counter: u64, flags: u64) -> i64 {
        self.sbi_call(sbi::STOP, &[counter, 1, flags]).0
    }

    fn shows(&mut self, counter: u64) -> u64;

    fn overflows(&mut self) -> u64;

    /// Configures and starts a counter for an event, from 0. Returns the counter.
    fn start_new(&mut self, event: u64) -> u64 {
        let (error, counter) = self.config(u64::MAX >> 55 & !2, CLEAR_VALUE, event);
        assert_eq!((error, self.starts(counter, 0)), (SUCCESS, SUCCESS));
        counter
    }
}

impl GuestKernel for Riscv<Script> {
    fn sbi_call(&mut self, function: u64, arguments: &[u64]) -> (i64, u64) {
        let mut all = [0; 6];
        all[..arguments.len()].copy_from_slice(arguments);
        let Answer { error, value } = self.call(function, all);
        (error, value)
    }

    fn shows(&mut self, counter: u64) -> u64 {
        let Value(value) = self.read(CYCLE + u32::try_from(counter).unwrap()) else { panic!("{counter}") };
        value
    }

    fn overflows(&mut self) -> u64 {
        let Value(overflows) = self.read(OVERFLOWS) else { panic!("it has no Sscofpmf") };
        overflows
    }
}

#[test]
fn a_kernel_finds_the_number_and_the_csrs_of_its_counters() {
    for (shape, number, set) in
        [(SHAPE, 9, ALL), (BASE, 3, 0b101), (Shape { programmable: 29, overflows: true }, 32, 0xffff_fffd)]
    {
        let (mut pmu, _) = pmu(shape);
        assert_eq!(pmu.sbi_call(NUM_COUNTERS, &[]), (SUCCESS, number));
        for counter in (0..40).chain([64, 1 << 32, u64::MAX]) {
            let is_there = counter < 64 && set & 1 << counter != 0;
            let expected =
                if is_there { (SUCCESS, (0xc00 + counter) | 63 << 12) } else { (INVALID_PARAM, 0) };
            assert_eq!(pmu.sbi_call(sbi::GET_INFO, &[counter]), expected, "{counter}");
        }
    }
}

#[test]
fn firmware_counters_snapshots_and_unknown_functions_are_refused() {
    let (mut pmu, _) = pmu(SHAPE);
    for counter in [0, 1, 3, 9, u64::MAX] {
        assert_eq!(pmu.sbi_call(sbi::FIRMWARE_READ, &[counter]), (INVALID_PARAM, 0));
        assert_eq!(pmu.sbi_call(sbi::FIRMWARE_READ_HIGH, &[counter]), (INVALID_PARAM, 0));
    }
    for function in [7, 8, 9, u64::MAX] {
        assert_eq!(pmu.sbi_call(function, &[u64::MAX, u64::MAX]), (NOT_SUPPORTED, 0));
    }
    pmu.config(ALL, 0, CYCLES);
    assert_eq!(pmu.sbi_call(sbi::START, &[3, 1, 2]), (NO_SHMEM, 0));
    assert_eq!(pmu.sbi_call(sbi::STOP, &[3, 1, 2]), (NO_SHMEM, 0));
    assert_eq!(pmu.sbi_call(sbi::START, &[3, 1, 4]), (INVALID_PARAM, 0));
    assert_eq!(pmu.sbi_call(sbi::STOP, &[3, 1, 4]), (INVALID_PARAM, 0));
}

#[test]
fn an_event_is_not_supported_if_the_host_lacks_it_but_not_if_others_hold_the_hardware() {
    let (mut pmu, host) = pmu(SHAPE);
    host.starve(true);
    // Linux checks events at boot like this.
    let mut check = |event, data| {
        let (error, counter) = pmu.sbi_call(sbi::CONFIG_MATCHING, &[0, ALL, 0, event, data]);
        if error == SUCCESS {
            assert_eq!(pmu.stops(counter, RESET), ALREADY_STOPPED);
        }
        error
    };
    let Event::Raw(refused) = REFUSED else { panic!("the event has an encoding") };
    for event in [CYCLES, INSTRUCTIONS, BRANCHES, DTLB_LOAD_MISSES] {
        assert_eq!(check(event, 0), SUCCESS, "{event:#x}");
    }
    assert_eq!([check(RAW, 0x1234), check(RAW, refused)], [SUCCESS, NOT_SUPPORTED]);
    assert_eq!(event::decode(BUS_CYCLES, 0), Some(UNKNOWN));
    // No host has these events. The last one is a firmware event.
    for event in [BUS_CYCLES, 0, 11, 0x1_0038, 0x4_0000, u64::MAX, 0xf_0005] {
        assert_eq!(check(event, 0), NOT_SUPPORTED, "{event:#x}");
    }
    assert_eq!(pmu.report().statistics.system_calls, 0, "only a running counter has a backing event");
    assert!(pmu.report().counters.iter().all(|counter| counter.state == State::Unused));
}

#[test]
fn a_kernel_can_ask_which_events_there_are() {
    let (mut pmu, _) = pmu(Shape { programmable: 2, overflows: true });
    assert!(pmu.has_event(1, 0) && pmu.has_event(2, 0), "cycles and instructions");
    assert!(!pmu.has_event(7, 0), "bus-cycles, which the host does not have");
    assert!(!pmu.has_event(0xf_0000, 0) && !pmu.has_event(u64::MAX, u64::MAX));
    pmu.set_policy(&of_events(&["cycles"]));
    assert!(pmu.has_event(1, 0) && !pmu.has_event(2, 0));
}

#[test]
fn a_fixed_counter_is_taken_only_if_the_set_has_no_programmable_one() {
    let (mut pmu, _) = pmu(SHAPE);
    assert_eq!(pmu.config(ALL, 0, CYCLES), (SUCCESS, 3));
    assert_eq!(pmu.config(ALL, 0, INSTRUCTIONS), (SUCCESS, 4));
    for counter in 5..9 {
        assert_eq!(pmu.config(ALL, 0, BRANCHES), (SUCCESS, counter));
    }
    assert_eq!(pmu.config(ALL, 0, BRANCHES), (NOT_SUPPORTED, 0), "all programmable counters are in use");
    assert_eq!(pmu.config(ALL, 0, INSTRUCTIONS), (NOT_SUPPORTED, 0), "the guest may want to sample them");
    assert_eq!(pmu.config(0b101, 0, INSTRUCTIONS), (SUCCESS, 2));
    assert_eq!(pmu.config(0b101, 0, INSTRUCTIONS), (NOT_SUPPORTED, 0));
    assert_eq!(pmu.config(0b001, 0, CYCLES), (SUCCESS, 0));
}

#[test]
fn without_sscofpmf_fixed_counters_are_taken_first() {
    let (mut pmu, _) = pmu(SILENT);
    assert_eq!(pmu.config(ALL, 0, CYCLES), (SUCCESS, 0));
    assert_eq!(pmu.config(ALL, 0, CYCLES), (SUCCESS, 3));
    assert_eq!(pmu.config(ALL, 0, INSTRUCTIONS), (SUCCESS, 2));
    assert_eq!(pmu.config(ALL & !0b1000, 0, BRANCHES), (SUCCESS, 4));
}

#[test]
fn a_pmu_without_programmable_counters_counts_cycles_and_instructions() {
    let (mut pmu, host) = pmu(BASE);
    assert_eq!(pmu.config(0b101, 0, BRANCHES), (NOT_SUPPORTED, 0));
    assert_eq!([pmu.starts(0, 5), pmu.starts(2, 0)], [SUCCESS; 2], "fixed counters need no configuration");
    assert!(run(&mut pmu, &host, 100).is_empty());
    assert_eq!([pmu.shows(0), pmu.shows(2)], [105, 100]);
    assert_eq!(pmu.read(OVERFLOWS), Fault);
    assert_eq!(pmu.read(CYCLE + 3), Fault);
}

#[test]
fn a_counter_counts_where_it_is_not_inhibited() {
    for (flags, filter) in [
        (VIRTUAL_MODES | NOT_IN_M_MODE, Some(Filter::All)),
        (NOT_IN_USER_MODE, Some(Filter::Kernel)),
        (NOT_IN_THE_KERNEL | NOT_IN_M_MODE, Some(Filter::User)),
        (NOT_IN_USER_MODE | NOT_IN_THE_KERNEL, None),
    ] {
        let (mut pmu, host) = pmu(SHAPE);
        assert_eq!(pmu.config(ALL, flags | AUTO_START, BRANCHES), (SUCCESS, 3));
        assert_eq!(host.selections().first().map(|selection| selection.filter), filter, "{flags:#x}");
        run(&mut pmu, &host, 100);
        assert_eq!(pmu.shows(3), if filter.is_some() { 100 } else { 0 });
    }
}

#[test]
fn only_flags_change_the_value_of_a_stopped_counter() {
    let (mut pmu, host) = pmu(SHAPE);
    assert_eq!(pmu.config(ALL, 0, BRANCHES), (SUCCESS, 3));
    assert_eq!(pmu.starts(3, 1000), SUCCESS);
    run(&mut pmu, &host, 10);
    assert_eq!(pmu.stops(3, 0), SUCCESS);
    run(&mut pmu, &host, 10);
    assert_eq!(pmu.shows(3), 1010, "it stands still");
    assert_eq!(pmu.sbi_call(sbi::START, &[3, 1, 0, 7]), (SUCCESS, 0));
    run(&mut pmu, &host, 10);
    assert_eq!(pmu.shows(3), 1020, "and goes on from there");
    assert_eq!(pmu.stops(3, RESET), SUCCESS);
    assert_eq!(pmu.config(ALL, AUTO_START, BRANCHES), (SUCCESS, 3));
    assert_eq!(pmu.shows(3), 1020, "a configuration keeps the value");
    pmu.stops(3, RESET);
    assert_eq!(pmu.config(ALL, AUTO_START | CLEAR_VALUE, CYCLES), (SUCCESS, 3));
    run(&mut pmu, &host, 10);
    assert_eq!(pmu.shows(3), 10);
}

#[test]
fn with_skip_match_the_first_counter_is_taken_if_it_can_count_the_event() {
    let (mut pmu, _) = pmu(SHAPE);
    assert_eq!(pmu.sbi_call(sbi::CONFIG_MATCHING, &[5, 0b11, SKIP_MATCH, BRANCHES]), (SUCCESS, 5));
    assert_eq!(pmu.config(0b1, SKIP_MATCH, CYCLES), (SUCCESS, 0));
    assert_eq!(pmu.config(0b101, SKIP_MATCH, INSTRUCTIONS), (NOT_SUPPORTED, 0), "the first is `cycle`");
    assert_eq!(pmu.config(0b100, SKIP_MATCH, INSTRUCTIONS), (SUCCESS, 2));
    assert_eq!(pmu.config(1 << 5, SKIP_MATCH, CYCLES), (SUCCESS, 5), "in use or not");
}

#[test]
fn a_set_with_a_counter_that_does_not_exist_is_refused() {
    let (mut pmu, _) = pmu(SHAPE);
    for (base, mask) in
        [(0, 0), (1, 1), (0, 0b111), (8, 0b11), (9, 1), (64, 1), (u64::MAX, u64::MAX), (4, 1 << 63)]
    {
        for (function, event) in [(sbi::CONFIG_MATCHING, CYCLES), (sbi::START, 0), (sbi::STOP, 0)] {
            assert_eq!(
                pmu.sbi_call(function, &[base, mask, 0, event]),
                (INVALID_PARAM, 0),
                "{base:#x} {mask:#x}"
            );
        }
    }
    assert_eq!(pmu.sbi_call(sbi::CONFIG_MATCHING, &[8, 1, 0, CYCLES]), (SUCCESS, 8));
}

#[test]
fn a_set_is_started_and_stopped_even_if_some_of_its_counters_already_were() {
    let (mut pmu, host) = pmu(SHAPE);
    assert_eq!(pmu.starts(3, 0), INVALID_PARAM, "counter 3 has no event");
    pmu.config(1 << 3, 0, CYCLES);
    pmu.config(1 << 4, 0, BRANCHES);
    assert_eq!(pmu.sbi_call(sbi::START, &[0, 0b11_1001, 0]), (INVALID_PARAM, 0), "counter 5 has no event");
    assert_eq!(pmu.stops(0, 0), ALREADY_STOPPED, "no counter was started");
    assert_eq!(pmu.starts(3, 5), SUCCESS);
    assert_eq!(pmu.sbi_call(sbi::START, &[3, 0b11, SET_INIT_VALUE, 7]), (ALREADY_STARTED, 0));
    run(&mut pmu, &host, 10);
    assert_eq!([pmu.shows(3), pmu.shows(4)], [15, 17]);
    assert_eq!(pmu.stops(3, 0), SUCCESS);
    assert_eq!(pmu.sbi_call(sbi::STOP, &[0, ALL, RESET]), (ALREADY_STOPPED, 0));
    run(&mut pmu, &host, 10);
    assert_eq!([pmu.shows(3), pmu.shows(4)], [15, 17]);
    assert_eq!(pmu.starts(4, 0), INVALID_PARAM, "counter 4 has no event any more");
}

#[test]
fn csrs_are_read_only_and_those_of_missing_counters_fault() {
    let (mut pmu, _) = pmu(SHAPE);
    for csr in [0xc00, 0xc02, 0xc03, 0xc08, 0xda0] {
        assert_eq!((pmu.read(csr), pmu.write(csr, 1)), (Value(0), Fault), "{csr:#x}");
    }
    for csr in [0xc09, 0xc1f] {
        assert_eq!((pmu.read(csr), pmu.write(csr, 1)), (Fault, Fault), "{csr:#x}");
    }
    for csr in [0, 0x105, 0xbff, 0xc01, 0xc20, 0xda1, u32::MAX] {
        assert_eq!((pmu.read(csr), pmu.write(csr, 1)), (NotHandled, NotHandled), "{csr:#x}");
    }
}

/// Does what Linux' overflow handler does: stops the used counters, reads which have overflowed, and starts all of them
/// again, those that have overflowed with a new period. Returns the counters that have overflowed.
fn handle_overflow(
    pmu: &mut Riscv<Script>,
    host: &Script,
    used: u64,
    in_handler: u64,
    periods: &[u64],
) -> u64 {
    pmu.sbi_call(sbi::STOP, &[0, used, 0]);
    assert!(run(pmu, host, in_handler).is_empty());
    let overflown = pmu.overflows();
    let others = used & !overflown;
    if others != 0 {
        assert_eq!(pmu.sbi_call(sbi::START, &[0, others, 0]), (SUCCESS, 0));
    }
    for (counter, period) in (3..).zip(periods).filter(|(counter, _)| overflown & 1 << counter != 0) {
        assert_eq!(pmu.shows(counter), 0, "no counts since the overflow");
        assert_eq!(pmu.starts(counter, period.wrapping_neg()), SUCCESS);
    }
    overflown
}

#[test]
fn sampling_interrupts_at_every_period_and_nowhere_else() {
    for (in_handler, periods) in
        [(0, [100_000, 30_000]), (5000, [100_000, 30_000]), (77, [1, 2]), (5000, [FAR + 1000, 3 * FAR])]
    {
        let (mut pmu, host) = pmu(SHAPE);
        assert_eq!(pmu.config(ALL, CLEAR_VALUE, INSTRUCTIONS), (SUCCESS, 3));
        assert_eq!(pmu.config(ALL, CLEAR_VALUE, CYCLES), (SUCCESS, 4));
        let sum = pmu.start_new(BRANCHES);
        assert_eq!(sum, 5);
        for (counter, period) in (3..).zip(periods) {
            assert_eq!(pmu.starts(counter, 0_u64.wrapping_sub(period)), SUCCESS);
        }
        let (mut left, mut total) = (periods, 0);
        for _ in 0..200 {
            host.time_passes(Duration::from_millis(1));
            let next = left[0].min(left[1]);
            assert_eq!(run(&mut pmu, &host, next - 1), [] as [u64; 0], "{left:?}");
            assert_eq!(run(&mut pmu, &host, 1), [1], "{left:?}");
            total += next;
            let overflown = handle_overflow(&mut pmu, &host, 0b11_1000, in_handler, &periods);
            let mut expected = 0;
            for (number, left) in left.iter_mut().enumerate() {
                *left -= next;
                if *left == 0 {
                    (*left, expected) = (periods[number], expected | 0b1000 << number);
                }
            }
            assert_eq!((overflown, pmu.overflows()), (expected, 0));
        }
        assert_eq!(pmu.shows(sum), total, "without the counts in the handler");
        assert_eq!([pmu.shows(3), pmu.shows(4)], left.map(u64::wrapping_neg));
    }
}

#[test]
fn a_counter_that_starts_halfway_does_not_interrupt() {
    // Linux starts a counter without a period there, so that it can tell whether the counter wrapped before it was
    // read.
    let start = (u64::MAX >> 1).wrapping_neg();
    let (mut pmu, host) = pmu(SHAPE);
    assert_eq!(pmu.config(ALL, 0, INSTRUCTIONS), (SUCCESS, 3));
    assert_eq!(pmu.starts(3, start), SUCCESS);
    assert!(run(&mut pmu, &host, 5 * FAR).is_empty());
    assert_eq!((pmu.shows(3), pmu.overflows()), (start + 5 * FAR, 0));
}

#[test]
fn an_overflow_bit_stays_until_its_counter_is_started_or_configured_again() {
    let (mut pmu, host) = pmu(SHAPE);
    pmu.config(1 << 3, 0, INSTRUCTIONS);
    pmu.config(1 << 8, 0, INSTRUCTIONS);
    for again in 0..3 {
        assert_eq!([pmu.starts(3, u64::MAX), pmu.starts(8, u64::MAX - 1)], [SUCCESS; 2]);
        assert_eq!(pmu.overflows(), 0);
        assert_eq!(run(&mut pmu, &host, 10), [1, 2]);
        assert_eq!(pmu.overflows(), 0b1_0000_1000);
        pmu.sbi_call(sbi::STOP, &[0, 0b1_0000_1000, 0]);
        assert_eq!(pmu.overflows(), 0b1_0000_1000, "a stop leaves it");
        if again == 1 {
            pmu.stops(3, RESET);
            assert_eq!(pmu.config(1 << 8, SKIP_MATCH, BRANCHES), (SUCCESS, 8));
            assert_eq!(pmu.overflows(), 0);
            assert_eq!(pmu.config(1 << 3, 0, INSTRUCTIONS), (SUCCESS, 3));
        }
    }
}

#[test]
fn fixed_counters_do_not_interrupt_and_without_sscofpmf_no_counter_does() {
    for (shape, counter) in [(SHAPE, 0), (SHAPE, 2), (SILENT, 0), (SILENT, 4)] {
        let (mut pmu, host) = pmu(shape);
        let event = if counter == 2 { INSTRUCTIONS } else { CYCLES };
        assert_eq!(pmu.config(1 << counter, 0, event), (SUCCESS, counter));
        assert_eq!(pmu.starts(counter, u64::MAX), SUCCESS);
        assert!(run(&mut pmu, &host, 10).is_empty());
        assert_eq!(pmu.shows(counter), 9);
        assert_eq!(pmu.read(OVERFLOWS), if shape.overflows { Value(0) } else { Fault });
    }
}

#[test]
fn task_switches_need_no_request_to_the_host() {
    let (mut pmu, host) = pmu(SHAPE);
    let switch_in =
        |pmu: &mut Riscv<Script>| [BRANCHES, CYCLES, INSTRUCTIONS].map(|event| pmu.start_new(event));
    let counters = switch_in(&mut pmu);
    let before = host.requests();
    for round in 0..100 {
        for counter in counters {
            assert_eq!([pmu.stops(counter, 0), pmu.stops(counter, RESET)], [SUCCESS, ALREADY_STOPPED]);
        }
        run(&mut pmu, &host, 1000);
        // Another task counts one of the events.
        if round % 3 == 0 {
            let instructions = pmu.start_new(INSTRUCTIONS);
            assert_eq!(instructions, counters[2], "the counter whose backing event counts them");
            pmu.stops(instructions, RESET);
        }
        assert_eq!(switch_in(&mut pmu), counters);
        run(&mut pmu, &host, 10);
        assert_eq!(counters.map(|counter| pmu.shows(counter)), [10; 3]);
    }
    assert_eq!(host.requests(), before);
    pmu.sbi_call(sbi::STOP, &[0, ALL, RESET]);
    for _ in 0..2 {
        pmu.unit().bank.release_idle();
    }
    assert_eq!(host.counters(), 0, "idle events are released");
}

#[test]
fn a_report_names_what_the_guest_counts() {
    let (mut pmu, host) = pmu(SHAPE);
    assert_eq!(pmu.config(ALL, NOT_IN_THE_KERNEL | AUTO_START, DTLB_LOAD_MISSES), (SUCCESS, 3));
    assert_eq!(pmu.sbi_call(sbi::CONFIG_MATCHING, &[0, ALL, 0, RAW, 0x1234]), (SUCCESS, 4));
    run(&mut pmu, &host, 5);
    let told = |pmu: &mut Riscv<Script>, counter: usize| {
        let report = pmu.report().counters.swap_remove(counter);
        (report.event.unwrap_or_default(), report.value, report.state)
    };
    assert_eq!(told(&mut pmu, 3), ("dTLB-load-misses:u".to_owned(), 5, State::Counting));
    assert_eq!(told(&mut pmu, 4), ("r1234:uk".to_owned(), 0, State::Stopped));
    assert_eq!(told(&mut pmu, 1), (String::new(), 0, State::Unused));
    pmu.sbi_call(sbi::STOP, &[3, 0b11, RESET]);
    assert_eq!(told(&mut pmu, 3), (String::new(), 5, State::Unused));
    assert!(pmu.unit().set_counter_switch(3, Switch::Off));
    assert_eq!(pmu.start_new(BRANCHES), 3);
    run(&mut pmu, &host, 5);
    assert_eq!(told(&mut pmu, 3), ("branches:uk".to_owned(), 0, State::Disabled));
}

fn of_events(events: &[&str]) -> Policy {
    let rules = events.iter().map(|event| event.parse().unwrap()).collect();
    Policy { allowed: Allowed::These(rules), ..Policy::default() }
}

#[test]
fn a_denied_event_is_not_supported_and_stands_still_if_it_counted_before() {
    let (mut pmu, host) = pmu(SHAPE);
    let counters = [CYCLES, DTLB_LOAD_MISSES].map(|event| pmu.start_new(event));
    assert_eq!(pmu.sbi_call(sbi::CONFIG_MATCHING, &[0, ALL, AUTO_START, RAW, 0x55]), (SUCCESS, 5));
    pmu.set_policy(&of_events(&["cpu-cycles", "r55"]));
    run(&mut pmu, &host, 10);
    assert_eq!([pmu.shows(counters[0]), pmu.shows(counters[1]), pmu.shows(5)], [10, 0, 10]);
    let told: Vec<_> = pmu.unit().bank.take_notices().iter().map(ToString::to_string).collect();
    assert_eq!(told, ["counter 4 stands still: the policy denies r10019:uk (dTLB-load-misses)"]);
    assert_eq!(pmu.config(ALL, 0, INSTRUCTIONS), (NOT_SUPPORTED, 0));
    pmu.set_policy(&of_events(&["dTLB-load-misses"]));
    run(&mut pmu, &host, 10);
    assert_eq!([pmu.shows(counters[0]), pmu.shows(counters[1]), pmu.shows(5)], [10, 10, 10]);
}

#[test]
fn tiers_have_the_same_events_as_on_x86() {
    for (tier, allowed, denied) in [
        (Tier::Architectural, vec![CYCLES, INSTRUCTIONS, BRANCHES], vec![DTLB_LOAD_MISSES, 9]),
        (Tier::Standard, vec![CYCLES, DTLB_LOAD_MISSES, 9], vec![0x1_0010, 0x1_0030, 3, 4, RAW]),
        (Tier::Enhanced, vec![CYCLES, 0x1_0010, 0x1_0030, 3, 4, RAW], vec![]),
    ] {
        let (mut pmu, _) = pmu(SHAPE);
        pmu.set_policy(&Policy { allowed: Allowed::Tier(tier), ..Policy::default() });
        for (events, expected) in [(allowed, SUCCESS), (denied, NOT_SUPPORTED)] {
            for event in events {
                assert_eq!(pmu.config(1 << 3, SKIP_MATCH, event).0, expected, "{tier:?} {event:#x}");
            }
        }
    }
}

#[test]
fn with_hybrid_freeze_cycles_also_count_in_the_host() {
    let (mut pmu, host) = pmu(SHAPE);
    pmu.set_policy(&Policy { freeze: Freeze::Hybrid, ..Policy::default() });
    pmu.start_new(CYCLES);
    pmu.start_new(INSTRUCTIONS);
    let scopes: Vec<_> = host.selections().iter().map(|selection| selection.scope).collect();
    assert_eq!(scopes, [Scope::Thread, Scope::Guest]);
}

#[test]
fn interrupts_are_limited_as_on_x86() {
    let (mut pmu, host) = pmu(SHAPE);
    pmu.set_policy(&Policy { max_interrupts_per_second: NonZeroU32::new(10), ..Policy::default() });
    pmu.config(ALL, 0, CYCLES);
    let mut interrupts = 0;
    for _ in 0..20 {
        pmu.starts(3, 1000_u64.wrapping_neg());
        interrupts += run(&mut pmu, &host, 1000).len();
        assert_eq!(pmu.overflows(), 1 << 3, "a withheld overflow is visible");
        pmu.stops(3, 0);
    }
    assert_eq!(interrupts, 1);
}
