//! Predicts whether overflows can be coalesced into one interrupt. Nearly all kernels stop all counters first when an overflow
//! interrupts them, and look at the status after that. For such a kernel, overflows between the interrupt and the stop belong to
//! that interrupt: they need no alarm, and none is an interrupt of its own.

/// What the kernel did first after the last interrupt.
#[derive(Debug, Default)]
pub struct Coalescing {
    /// The kernel was interrupted and has not accessed the counters since.
    is_interrupted: bool,
    stops_first: bool,
}

impl Coalescing {
    /// Records that the kernel is interrupted.
    pub fn interrupted(&mut self) {
        self.is_interrupted = true;
    }

    /// Records that the kernel stops all counters. Returns true if that is its first access since the interrupt.
    pub fn stopped(&mut self) -> bool {
        let first = std::mem::take(&mut self.is_interrupted);
        self.stops_first |= first;
        first
    }

    /// Records another access, or an alarm. Returns true if it is the first since the interrupt.
    pub fn accessed(&mut self) -> bool {
        let first = std::mem::take(&mut self.is_interrupted);
        self.stops_first &= !first;
        first
    }

    /// Forgets the interrupt: the first access will be made on the shared page.
    pub fn not_observed(&mut self) {
        self.is_interrupted = false;
    }

    /// Predicts whether the kernel stops all counters first at its next interrupt.
    pub fn stops_first(&self) -> bool {
        self.stops_first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_done_first_the_last_time_is_expected() {
        let mut coalescing = Coalescing::default();
        assert!(!coalescing.stopped() && !coalescing.stops_first(), "nothing has interrupted it");
        coalescing.interrupted();
        assert!(coalescing.stopped() && coalescing.stops_first());
        assert!(!coalescing.stopped() && coalescing.stops_first(), "once for an interrupt");
        assert!(!coalescing.accessed() && coalescing.stops_first(), "behind the stop it may do as it likes");
        coalescing.interrupted();
        coalescing.not_observed();
        assert!(!coalescing.accessed() && coalescing.stops_first(), "nobody knows what was first");
        coalescing.interrupted();
        assert!(coalescing.accessed() && !coalescing.stopped() && !coalescing.stops_first());
    }
}
