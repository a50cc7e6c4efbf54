//! The time-stamp counter.

/// Returns the current value of the host's time-stamp counter.
pub fn ticks() -> u64 {
    // SAFETY: every processor that runs guests has a time-stamp counter, and Linux lets programs read it.
    unsafe { std::arch::x86_64::_rdtsc() }
}
