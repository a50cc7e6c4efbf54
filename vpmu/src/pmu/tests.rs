//! The life of an overflow, from the alarm of the host's event to the next alarm, without KVM.

mod branches;
mod room;

use std::convert::Infallible;
use std::num::NonZeroU32;
use std::time::Duration;

use super::*;
use crate::event::{Event, GenericEvent};
use crate::model::intel::Shape;
use crate::policy::Allowed;
use crate::source::script::Script;

const PERIOD: u64 = 10_000;
const AT_PERIOD: u64 = (1 << 48) - PERIOD;

/// A vCPU whose guest handles an interrupt at once.
#[derive(Default)]
struct Vcpu {
    interrupts: usize,
}

impl Platform for Vcpu {
    type Error = Infallible;

    fn inject(&mut self, _lvt_note: Option<LvtNote<'_>>) -> Result<Injected, Infallible> {
        self.interrupts += 1;
        Ok(Injected::AtNextEntry)
    }
}

struct Guest {
    pmu: VirtualPmu<Script>,
    host: Script,
    vcpu: Vcpu,
    /// What the VMM was last told to do with its timer.
    wake: Wake,
    pauses: bool,
}

const SELECT: u32 = 0xc001_0200;
const COUNTER: u32 = 0xc001_0201;
const STATUS: u32 = 0xc000_0300;
const CONTROL: u32 = 0xc000_0301;
const STATUS_CLEAR: u32 = 0xc000_0302;
/// Retired instructions, enabled, with an interrupt.
const SAMPLING: u64 = 0x53_00c0;
/// The same of programs only.
const SAMPLING_PROGRAMS: u64 = 0x51_00c0;

impl Guest {
    fn amd() -> Self {
        let host = Script::default();
        let pmu = VirtualPmu::amd(amd::Version::V2(6), Vendor::Amd, host.clone());
        Self { pmu, host, vcpu: Vcpu::default(), wake: Wake::Never, pauses: false }
    }

    fn intel() -> Self {
        let host = Script::default();
        let shape = Shape { version: intel::Version::V5, general: 4, fixed: 3, absent: 0 };
        let pmu = VirtualPmu::intel(shape, Vendor::Intel, host.clone());
        Self { pmu, host, vcpu: Vcpu::default(), wake: Wake::Never, pauses: false }
    }

    fn exits(&mut self, cause: Cause) {
        let Ok(next) = self.pmu.after_exit(cause, &mut self.vcpu);
        if next.wake != Wake::Unchanged {
            self.wake = next.wake;
        }
        self.pauses = next.pause;
    }

    fn write(&mut self, register: u32, value: u64) {
        assert_eq!(self.pmu.access(Access::Write(register, value)), Outcome::Handled);
        self.exits(Cause::Guest);
    }

    fn read(&mut self, register: u32) -> u64 {
        let Outcome::Value(value) = self.pmu.access(Access::Read(register)) else { panic!("{register:#x}") };
        self.exits(Cause::Guest);
        value
    }

    /// Runs the guest, which handles each interrupt. Returns the counts at which it was interrupted.
    fn runs(&mut self, counts: u64, mut handler: impl FnMut(&mut Self)) -> Vec<u64> {
        let mut at = Vec::new();
        self.host.clone().guest_runs(counts, |left| {
            let before = self.vcpu.interrupts;
            self.exits(Cause::Alarm);
            if self.vcpu.interrupts > before {
                at.push(counts - left);
                handler(self);
            }
        });
        at
    }
}

/// Handles an overflow as Linux does: stops all counters, looks at the status, writes the counters anew, and starts
/// them.
fn handle(guest: &mut Guest) {
    guest.write(CONTROL, 0);
    let status = guest.read(STATUS);
    for counter in (0..6).filter(|counter| status & 1 << counter != 0) {
        guest.write(COUNTER + 2 * counter, AT_PERIOD);
    }
    guest.write(STATUS_CLEAR, status);
    guest.write(CONTROL, 0x3f);
}

fn sampling(counters: u32) -> Guest {
    let mut guest = Guest::amd();
    guest.write(CONTROL, 0);
    for counter in 0..counters {
        guest.write(COUNTER + 2 * counter, AT_PERIOD);
        guest.write(SELECT + 2 * counter, SAMPLING);
    }
    guest.write(CONTROL, 0x3f);
    guest
}

#[test]
fn a_counter_interrupts_once_in_each_period() {
    let mut guest = sampling(1);
    assert_eq!(guest.runs(35_000, handle), [10_000, 20_000, 30_000]);
    assert_eq!(guest.read(COUNTER), AT_PERIOD + 5_000);
    let statistics = guest.pmu.report().statistics;
    assert_eq!((statistics.overflows, statistics.interrupts), (3, 3));
}

#[test]
fn counters_that_overflow_together_are_one_interrupt_and_one_event_of_the_host() {
    let mut guest = sampling(6);
    assert_eq!(guest.runs(10_500, |guest| assert_eq!(guest.read(STATUS), 0x3f)), [10_000]);
    assert_eq!(guest.host.counters(), 1);
}

#[test]
fn an_overflow_before_the_handler_stops_the_counters_belongs_to_its_interrupt() {
    let mut guest = sampling(1);
    // The kernel is known to stop its counters first once it has done so.
    guest.runs(10_000, handle);
    guest.write(CONTROL, 0);
    guest.write(COUNTER, AT_PERIOD);
    guest.write(COUNTER + 2, AT_PERIOD - 5);
    guest.write(SELECT + 2, SAMPLING);
    guest.write(CONTROL, 0x3f);
    let at = guest.runs(10_000, |_| ());
    assert_eq!(at, [10_000]);
    // The handler begins: the second counter overflows after 5 more counts, without an interrupt of its own.
    assert_eq!(guest.runs(100, |_| ()), [0; 0]);
    guest.write(CONTROL, 0);
    assert_eq!(guest.read(STATUS), 3);
    assert_eq!(guest.vcpu.interrupts, 2);
}

/// Samples with two counters, the second of which overflows 1,000 counts after the first. A period is so much longer
/// than the one before it. Returns the counts at which the guest was interrupted, and the status there.
fn samples_with_two(longer: u64) -> Vec<(u64, u64)> {
    const WIDTH: u64 = 1 << 48;
    let mut guest = Guest::amd();
    guest.write(CONTROL, 0);
    let mut period = 100_000;
    for (counter, first) in [(0, period), (1, period + 1_000)] {
        guest.write(COUNTER + 2 * counter, WIDTH - first);
        guest.write(SELECT + 2 * counter, SAMPLING_PROGRAMS);
    }
    guest.write(CONTROL, 0x3f);
    let mut statuses = Vec::new();
    let at = guest.runs(320_000, |guest| {
        guest.write(CONTROL, 0);
        let status = guest.read(STATUS);
        period += longer;
        for counter in (0..2).filter(|counter| status & 1 << counter != 0) {
            // What was counted since the overflow belongs to the next period.
            let past = guest.read(COUNTER + 2 * counter);
            guest.write(COUNTER + 2 * counter, WIDTH - period + past);
        }
        guest.write(STATUS_CLEAR, status);
        guest.write(CONTROL, 0x3f);
        statuses.push(status);
    });
    at.into_iter().zip(statuses).collect()
}

#[test]
fn overflows_at_a_rate_that_are_near_each_other_are_one_interrupt() {
    let first = [(100_000, 1), (101_000, 2)];
    let apart = [(200_000, 1), (201_000, 2), (300_000, 1), (301_000, 2)];
    assert_eq!(samples_with_two(0), [&first[..], &apart].concat(), "not with a fixed period");
    // The second overflows after 100,002 and 100,003 counts more: being late does not add up.
    assert_eq!(samples_with_two(1), [&first[..], &[(201_002, 3), (301_005, 3)]].concat());
}

#[test]
fn an_interrupt_freezes_the_counters_if_the_guest_wants_that() {
    const CONTROL: u32 = 0x38f;
    let mut guest = Guest::intel();
    guest.write(0x1d9, 1 << 12);
    guest.write(0x4c1, AT_PERIOD);
    guest.write(CONTROL, 1);
    guest.write(0x186, SAMPLING);
    assert_eq!(guest.runs(15_000, |_| ()), [10_000]);
    assert_eq!(guest.read(0xc1), 0, "it has stood still since the overflow");
    assert_eq!(guest.read(0x38e), 1 | 1 << 59, "overflowed and frozen");
    guest.write(0x390, 1 | 1 << 59);
    guest.runs(100, |_| ());
    assert_eq!(guest.read(0xc1), 100);
}

#[test]
fn a_throttled_interrupt_comes_when_the_limit_permits() {
    let mut guest = sampling(1);
    let limit = NonZeroU32::new(10);
    guest.pmu.set_policy(&Policy { max_interrupts_per_second: limit, ..Policy::default() });
    assert_eq!(guest.runs(10_000, handle), [10_000]);
    assert_eq!(guest.runs(10_000, handle), [0; 0], "the second within a tenth of a second");
    let mut waited = Duration::ZERO;
    while guest.vcpu.interrupts == 1 {
        let Wake::After(time) = guest.wake else { panic!("{:?}", guest.wake) };
        guest.host.time_passes(time);
        waited += time;
        guest.wake = Wake::Never;
        guest.exits(Cause::Kick);
    }
    assert_eq!(waited, Duration::from_millis(100));
    assert_eq!(guest.pmu.report().statistics.withheld, 1);
}

#[test]
fn a_counter_that_stands_still_gives_its_hardware_back_and_the_timer_stops() {
    let mut guest = sampling(1);
    assert_eq!(guest.wake, Wake::After(Duration::from_millis(50)));
    guest.write(CONTROL, 0);
    let mut polls = 0;
    while let Wake::After(time) = guest.wake {
        assert!(polls < 100);
        guest.host.time_passes(time);
        // A timer expires once.
        guest.wake = Wake::Never;
        guest.exits(Cause::Kick);
        polls += 1;
    }
    assert_eq!((guest.wake, guest.host.counters()), (Wake::Never, 0));
    // It is released when it has stood still from one look, once a second, to the next.
    assert_eq!(polls, 40);
}

#[test]
fn a_kick_by_another_thread_does_not_move_the_timer() {
    let mut guest = sampling(1);
    guest.host.time_passes(Duration::from_millis(49));
    guest.wake = Wake::Unchanged;
    guest.exits(Cause::Kick);
    assert_eq!(guest.wake, Wake::Unchanged);
    guest.host.time_passes(Duration::from_millis(1));
    guest.exits(Cause::Kick);
    assert_eq!(guest.wake, Wake::After(Duration::from_millis(50)));
}

#[test]
fn a_starved_counter_is_polled_more_often_and_may_pause_the_machine() {
    let mut guest = sampling(1);
    guest.pmu.set_policy(&Policy { on_starvation: OnStarvation::Stop, ..Policy::default() });
    guest.host.starve(true);
    guest.host.time_passes(Duration::from_millis(50));
    guest.exits(Cause::Kick);
    assert!(guest.pauses);
    assert_eq!(guest.wake, Wake::After(Duration::from_micros(100)));
    guest.pmu.paused();
    assert!(!guest.pmu.may_resume());
    guest.host.starve(false);
    assert!(guest.pmu.may_resume());
    guest.exits(Cause::Kick);
    assert!(!guest.pauses);
}

/// Lets the timer expire until `until`, and returns the times at which it has expired.
fn expires_until(guest: &mut Guest, until: Duration) -> Vec<Duration> {
    let mut expired = Vec::new();
    while let Wake::After(time) = guest.wake
        && guest.pmu.model.unit().bank.now() + time <= until
    {
        guest.host.time_passes(time);
        guest.wake = Wake::Never;
        guest.exits(Cause::Kick);
        expired.push(guest.pmu.model.unit().bank.now());
    }
    expired
}

#[test]
fn an_event_that_is_refused_for_a_moment_misses_little_more_than_that() {
    for microseconds in [50, 100, 1_000, 3_000, 20_000] {
        let mut guest = Guest::amd();
        guest.host.starve(true);
        guest.write(SELECT, SAMPLING);
        assert!(guest.pmu.model.unit().bank.is_starved(), "it is known at once");
        let refused = Duration::from_micros(microseconds);
        expires_until(&mut guest, refused);
        let now = guest.pmu.model.unit().bank.now();
        guest.host.time_passes(refused.saturating_sub(now));
        guest.host.starve(false);
        let Wake::After(time) = guest.wake else { panic!("{:?}", guest.wake) };
        guest.host.time_passes(time.saturating_sub(refused.saturating_sub(now)));
        guest.exits(Cause::Kick);
        let report = guest.pmu.report();
        assert_eq!(report.counters[0].starvations, 1);
        let missed = Duration::from_secs_f64(report.counters[0].starved);
        let most = (2 * refused + Duration::from_micros(100)).min(refused + Duration::from_millis(10));
        assert!((refused..=most).contains(&missed), "{refused:?}: {missed:?}");
    }
}

#[test]
fn an_event_that_is_refused_for_long_is_seldom_tried_for() {
    let mut guest = Guest::amd();
    guest.host.starve(true);
    guest.write(SELECT, SAMPLING);
    let tried = expires_until(&mut guest, Duration::from_secs(1));
    let first: Vec<_> = tried.iter().take(4).map(Duration::as_micros).collect();
    assert_eq!(first, [100, 300, 700, 1500]);
    assert_eq!(tried.len(), 105);
    // One more that is refused is tried for as soon as the first one was.
    let before = guest.pmu.model.unit().bank.now();
    guest.write(SELECT + 2, SAMPLING_PROGRAMS);
    let next = expires_until(&mut guest, before + Duration::from_millis(50));
    assert_eq!(next[0].saturating_sub(before).as_micros(), 100);
}

#[test]
fn an_event_that_a_new_policy_denies_is_not_started_again() {
    // `IA32_PERFEVTSEL0` and `IA32_PERF_GLOBAL_CTRL`.
    let instructions = Event::Generic(GenericEvent::Instructions);
    for (mut guest, select, control, event) in
        [(Guest::amd(), SELECT, CONTROL, Event::Raw(0xc0)), (Guest::intel(), 0x186, 0x38f, instructions)]
    {
        guest.write(control, 1);
        guest.write(select, SAMPLING);
        assert!(guest.host.take_started().iter().any(|selection| selection.event == event));
        let allowed = Allowed::These(Vec::new());
        guest.pmu.set_policy(&Policy { allowed, ..Policy::default() });
        let started = guest.host.take_started();
        assert!(started.iter().all(|selection| selection.event != event), "{started:?}");
        assert_eq!(guest.host.counters(), 0);
    }
}

#[test]
fn a_switched_off_counter_stands_still_whatever_the_guest_does() {
    let mut guest = sampling(1);
    assert!(guest.pmu.set_counter_switch(0, Switch::Off) && !guest.pmu.set_counter_switch(6, Switch::Off));
    assert_eq!(guest.runs(20_000, |_| ()), [0; 0]);
    assert_eq!(guest.read(COUNTER), AT_PERIOD);
    guest.pmu.set_counter_switch(0, Switch::On);
    assert_eq!(guest.runs(20_000, |_| ()), [10_000]);
}

#[test]
fn accesses_to_running_counters_are_instructions_too() {
    let mut guest = Guest::amd();
    guest.write(SELECT, SAMPLING);
    assert_eq!(
        guest.read(COUNTER),
        0,
        "the write that started it does not count, nor does the read that reads it"
    );
    assert_eq!(guest.read(COUNTER), 1);
    guest.write(SELECT + 2, 0);
    guest.write(CONTROL, 0);
    assert_eq!(guest.read(COUNTER), 4, "the write that stops it counts");
    assert_eq!(guest.read(COUNTER), 4);
    guest.write(CONTROL, 0x3f);
    assert_eq!(guest.read(COUNTER), 4);
    assert_eq!(guest.pmu.access(Access::Write(STATUS, 0)), Outcome::Fault);
    assert_eq!(guest.read(COUNTER), 5, "what faults does not retire");
}

#[test]
fn a_completed_instruction_counts_in_its_mode() {
    const USER: u64 = 0x41_00c0;
    const KERNEL: u64 = 0x42_00c0;
    const CYCLES: u64 = 0x43_0076;
    let mut guest = Guest::amd();
    guest.write(CONTROL, 0);
    for (counter, select) in (0..).zip([USER, KERNEL, USER | KERNEL, CYCLES]) {
        guest.write(SELECT + 2 * counter, select);
    }
    guest.write(CONTROL, 0xf);
    guest.pmu.completes_instruction(|| true);
    guest.exits(Cause::Guest);
    guest.pmu.completes_instruction(|| false);
    guest.exits(Cause::Guest);
    guest.write(CONTROL, 0);
    assert_eq!([0, 1, 2, 3].map(|counter| guest.read(COUNTER + 2 * counter)), [1, 2, 3, 0]);
    guest.pmu.completes_instruction(|| panic!("no counter runs"));
}

#[test]
fn a_program_s_own_read_counts_in_user_mode_after_it_has_read() {
    let mut guest = Guest::amd();
    guest.write(CONTROL, 0);
    guest.write(SELECT, 0x41_00c0);
    guest.write(SELECT + 2, 0x42_00c0);
    guest.write(CONTROL, 3);
    for expected in 0..3 {
        assert_eq!(guest.pmu.access(Access::ReadInProgram(0)), Outcome::Value(expected));
        guest.exits(Cause::Guest);
    }
    guest.write(CONTROL, 0);
    assert_eq!([guest.read(COUNTER), guest.read(COUNTER + 2)], [3, 1], "the write is the kernel's");
}

#[test]
fn a_completed_instruction_can_overflow_a_counter_and_brings_its_overflow_nearer() {
    let mut guest = sampling(1);
    assert_eq!(guest.runs(9_990, |_| ()), [0; 0]);
    for _ in 0..3 {
        guest.pmu.completes_instruction(|| false);
        guest.exits(Cause::Guest);
    }
    assert_eq!(guest.runs(100, handle), [7]);
    assert_eq!(
        guest.runs(10_000 - 93 - 1, |_| ()),
        [0; 0],
        "the handler's first write has counted, too late to matter"
    );
    guest.pmu.completes_instruction(|| false);
    guest.exits(Cause::Guest);
    assert_eq!(guest.vcpu.interrupts, 2, "at the instruction itself");
}
