//! The time-stamp counter.

/// How far it is.
pub fn ticks() -> u64 {
    // SAFETY: every processor that runs guests has a time-stamp counter, and Linux lets programs read it.
    unsafe { std::arch::x86_64::_rdtsc() }
}
