//! The processor's clock.

use std::arch::asm;

/// Reads the clock.
pub fn ticks() -> u64 {
    let now;
    // SAFETY: the instruction reads a register that Linux lets programs read, and has no other effect.
    unsafe { asm!("rdtime {}", out(reg) now, options(nomem, nostack)) };
    now
}
