//! Samples cycles at a rate, kernel included, as `perf record -F` does: what the handler counts is estimated, so that a
//! sample costs one exit.

#![cfg(target_arch = "x86_64")]

#[allow(dead_code, reason = "each test uses a part of it")]
mod guests;

use std::time::Duration;

use vpmu::{Cause, Outcome};
use vpmu_retarget::x86::stub::Value;

use guests::{CONTROL, COUNTER, Does, Guest, SELECT, STATUS, STATUS_CLEAR};

const CYCLES: u64 = 0x53_0076;
const INSTRUCTIONS: u64 = 0x53_00c0;
const WIDTH: u64 = 1 << 48;

/// Numbers that look random.
struct Random(u64);

impl Random {
    fn in_range(&mut self, range: std::ops::Range<u64>) -> u64 {
        // The generator of MMIX (Knuth, The Art of Computer Programming, volume 2, 3.3.4, table 1).
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        range.start + (self.0 >> 33) % (range.end - range.start)
    }
}

/// What perf knows of its event, and what really was counted.
struct Perf {
    random: Random,
    period: u64,
    /// By how much the period changes at most.
    variation: u64,
    left: i64,
    written: u64,
    counted: u64,
    /// Counts in the handlers before the counters were stopped.
    in_handlers: u64,
    samples: u64,
}

impl Perf {
    fn start(guest: &mut Guest, select: u64, variation: u64) -> Self {
        let period = 250_000;
        guest.write(CONTROL, 0);
        guest.write(SELECT, select);
        guest.write(COUNTER, WIDTH - period);
        guest.write(CONTROL, 0x3f);
        let written = WIDTH - period;
        let left = period.cast_signed();
        Self { random: Random(1), period, variation, left, written, counted: 0, in_handlers: 0, samples: 0 }
    }

    /// Updates the event from the counter.
    fn update(&mut self, guest: &mut Guest) {
        let Outcome::Value(value) = guest.read_counter(0) else { panic!("it can be read") };
        let delta = value.wrapping_sub(self.written) % WIDTH;
        self.written = value;
        self.counted += delta;
        self.left -= delta.cast_signed();
    }

    /// Handles an overflow. The kernel counts, too, until the counters are stopped, and not afterwards.
    fn handle(&mut self, guest: &mut Guest) {
        let host = guest.plain().host.clone();
        host.time_passes(Duration::from_micros(100));
        let before = self.random.in_range(250..350);
        host.guest_runs(before, |_| panic!("an alarm in the handler"));
        self.in_handlers += before;
        guest.write(CONTROL, 0);
        assert_eq!(guest.read(STATUS), Outcome::Value(1));
        self.update(guest);
        let change = self.random.in_range(0..2 * self.variation + 1);
        self.period = (self.period + change).saturating_sub(self.variation).clamp(200_000, 300_000);
        assert!(self.left <= 0, "{}", self.left);
        self.left += self.period.cast_signed();
        self.written = WIDTH - self.left.unsigned_abs();
        guest.write(COUNTER, self.written);
        guest.write(STATUS_CLEAR, 1);
        host.guest_runs(self.random.in_range(1_950..2_050), |_| panic!("an alarm in the handler"));
        guest.write(CONTROL, 0x3f);
        self.samples += 1;
    }

    /// Runs a program for so many counts. Returns how often the guest left.
    fn runs(&mut self, guest: &mut Guest, counts: u64) -> usize {
        let before = guest.plain().exits;
        let host = guest.plain().host.clone();
        host.guest_runs(counts, |_| {
            let interrupts = guest.plain().vcpu.interrupts;
            guest.plain().exit(Cause::Alarm);
            if guest.plain().vcpu.interrupts > interrupts {
                self.handle(guest);
            }
        });
        guest.plain().exits - before
    }

    fn stop(&mut self, guest: &mut Guest) {
        guest.write(CONTROL, 0);
        self.update(guest);
    }
}

#[test]
fn cycles_are_counted_right_in_the_long_run_and_a_sample_is_one_exit() {
    const PROGRAM: u64 = 1_000_000_000;
    let mut guest = Guest::amd(6, Value::Halves);
    let mut perf = Perf::start(&mut guest, CYCLES, 100);
    let exits = perf.runs(&mut guest, PROGRAM);
    perf.stop(&mut guest);
    let really = PROGRAM + perf.in_handlers;
    assert!(perf.counted.abs_diff(really) <= really / 10_000, "{} of {really}", perf.counted);
    let samples = usize::try_from(perf.samples).unwrap();
    assert!(samples > 3_900, "{samples}");
    assert!(exits < samples + samples / 4, "{exits} exits for {samples} samples");
}

#[test]
fn instructions_at_a_rate_and_cycles_with_a_period_are_counted_exactly() {
    const PROGRAM: u64 = 50_000_000;
    for (select, variation) in [(INSTRUCTIONS, 100), (CYCLES, 0)] {
        let mut guest = Guest::amd(6, Value::Halves);
        let mut perf = Perf::start(&mut guest, select, variation);
        perf.runs(&mut guest, PROGRAM);
        perf.stop(&mut guest);
        // The writes that stop the counters are instructions of the kernel, which the host does not count.
        let completed = if select == INSTRUCTIONS { perf.samples + 1 } else { 0 };
        assert_eq!(perf.counted, PROGRAM + perf.in_handlers + completed, "{select:#x}");
    }
}
