//! Coalesces overflows into one interrupt. Nearly all kernels stop all counters first when an overflow interrupts them,
//! and look at the status after that. For such a kernel, overflows between the interrupt and the stop belong to that
//! interrupt: they need no alarm, and none is an interrupt of its own.

/// Predicts what the kernel does first at its next interrupt, from what it did after the last one.
#[derive(Debug, Default)]
pub struct Coalescing {
    phase: Phase,
    /// The prediction.
    stops_first: bool,
    /// An alarm waits for the stop.
    awaits_stop: bool,
}

/// What has happened last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Phase {
    /// Nothing of these.
    #[default]
    Other,
    /// An alarm has expired, and the counters are being updated.
    Alarm,
    /// The kernel was interrupted and has not accessed the counters since.
    Interrupted,
}

impl Coalescing {
    /// Records that the kernel is interrupted.
    pub fn interrupted(&mut self) {
        self.phase = Phase::Interrupted;
    }

    /// Records that the kernel stops all counters. Returns true if that is its first access since the interrupt.
    pub fn stopped(&mut self) -> bool {
        let first = std::mem::take(&mut self.phase) == Phase::Interrupted;
        // Not `|=`: see `accessed`.
        if first {
            self.stops_first = true;
        }
        first
    }

    /// Records another access, or an alarm. Returns true if it is the first since the interrupt.
    pub fn accessed(&mut self) -> bool {
        let first = std::mem::take(&mut self.phase) == Phase::Interrupted;
        // Of `self.stops_first &= !first`, before a branch on `first` where this is inlined, Rust 1.95 removes the
        // comparison, and false is stored in both cases (rust-lang/rust#158206): nothing was ever predicted.
        // `tests/guest/tests/compiler.rs` has the case, and looks for others.
        if first {
            self.stops_first = false;
        }
        first
    }

    /// Forgets the interrupt: the first access will be made on the shared page.
    pub fn not_observed(&mut self) {
        self.phase = Phase::Other;
    }

    /// Records that an alarm has expired, before the counters are updated.
    pub fn alarm_begins(&mut self) {
        self.phase = Phase::Alarm;
    }

    /// Records that the counters were updated after an alarm.
    pub fn alarm_ends(&mut self) {
        self.phase = Phase::Other;
    }

    /// Returns whether the next alarm can wait until the kernel stops its counters, which it is predicted to do first.
    pub fn can_wait(&self) -> bool {
        self.phase == Phase::Alarm && self.stops_first
    }

    /// Returns whether the kernel is predicted to stop its counters first.
    pub fn predicts_stop(&self) -> bool {
        self.stops_first
    }

    /// Records that an alarm waits for the stop.
    pub fn alarm_waits(&mut self) {
        self.awaits_stop = true;
    }

    /// Returns whether an alarm waits for the stop.
    pub fn awaits_stop(&self) -> bool {
        self.awaits_stop
    }

    /// Records that no alarm waits any more. Returns whether one did.
    pub fn take_waiting(&mut self) -> bool {
        std::mem::take(&mut self.awaits_stop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_done_first_the_last_time_is_expected() {
        let mut coalescing = Coalescing::default();
        let predicts_stop = |coalescing: &mut Coalescing| {
            coalescing.alarm_begins();
            let predicts_stop = coalescing.can_wait();
            coalescing.alarm_ends();
            assert!(!coalescing.can_wait(), "no alarm has expired");
            predicts_stop
        };
        assert!(!coalescing.stopped(), "nothing has interrupted it");
        assert!(!predicts_stop(&mut coalescing));
        coalescing.interrupted();
        assert!(coalescing.stopped() && predicts_stop(&mut coalescing));
        assert!(!coalescing.stopped() && predicts_stop(&mut coalescing), "once for an interrupt");
        assert!(
            !coalescing.accessed() && predicts_stop(&mut coalescing),
            "after the stop it may do anything"
        );
        coalescing.interrupted();
        coalescing.not_observed();
        assert!(!coalescing.accessed() && predicts_stop(&mut coalescing), "nobody knows what was first");
        coalescing.interrupted();
        assert!(coalescing.accessed() && !coalescing.stopped() && !predicts_stop(&mut coalescing));
    }
}
