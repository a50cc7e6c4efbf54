//! Reads the counter CSRs of RISC-V.
//!
//! A CSR's number is a part of the instruction, so there is one instruction for each. Linux permits programs to read
//! only those CSRs on which their events are (`scounteren`). If an event loses its counter between the look at its page
//! and the read, the read is an illegal instruction. The handler of that signal then makes it a read without a result.

use std::arch::global_asm;
use std::sync::Once;

/// Number of counter CSRs, from `cycle` on.
const COUNTERS: u32 = 32;

// A pair of instructions, of eight bytes, for each counter.
global_asm!(
    ".pushsection .text.tally_read_counter, \"ax\", @progbits",
    ".option push",
    ".option norvc",
    ".balign 8",
    "tally_read_counter:",
    "slli a0, a0, 3",
    "lla a1, tally_counter_reads",
    "add a0, a0, a1",
    "li a1, 1",
    "jr a0",
    ".balign 8",
    "tally_counter_reads:",
    // CSRR a0, CSR; the CSR's number is in the upper twelve bits.
    ".set instruction, 0xc0002573",
    ".rept 32",
    ".word instruction",
    "ret",
    ".set instruction, instruction + (1 << 20)",
    ".endr",
    "tally_counter_not_read:",
    "li a1, 0",
    "ret",
    ".option pop",
    ".popsection",
);

/// What [`tally_read_counter`] returns, in two registers.
#[repr(C)]
struct Read {
    value: u64,
    is_read: u64,
}

unsafe extern "C" {
    /// Reads a counter's CSR. The number must be less than [`COUNTERS`].
    fn tally_read_counter(number: u64) -> Read;
    /// The instructions that read, and the first address after them.
    static tally_counter_reads: u8;
    static tally_counter_not_read: u8;
}

/// Prepares reads in this process: installs the handler of illegal instructions.
pub fn prepare() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: `sigaction` is a structure of numbers.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = skip_read as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        // SAFETY: the action is initialised, and its function is a signal handler. If the call fails, the process is as
        // it was.
        unsafe { libc::sigaction(libc::SIGILL, &raw const action, std::ptr::null_mut()) };
    });
}

/// Handles an illegal instruction: a read returns without a result. Anything else ends the process, as it does without
/// a handler.
extern "C" fn skip_read(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let (start, end) = (&raw const tally_counter_reads as u64, &raw const tally_counter_not_read as u64);
    // SAFETY: the kernel passes a valid context, whose first register is the program counter.
    let counter = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.__gregs[0] };
    if !(start..end).contains(counter) {
        // SAFETY: ends the process.
        unsafe { libc::abort() };
    }
    *counter = end;
}

/// Reads the counter with this number. Returns `None` if the event has just lost it.
pub fn read(index: u32) -> Option<u64> {
    if index >= COUNTERS {
        return None;
    }
    // SAFETY: there is an instruction for this number. It only reads a counter, or nothing at all.
    let Read { value, is_read } = unsafe { tally_read_counter(index.into()) };
    (is_read != 0).then_some(value)
}
