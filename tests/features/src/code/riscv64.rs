//! The counted code for RISC-V.

use std::arch::asm;

use super::{Call, Loop};
use crate::code::Codes;
use crate::failure::{Failure, equal};

/// Returns the raw event codes of the simulated host's CPU, which its guests use too. RISC-V defines no raw event
/// codes, so each vendor has its own.
#[expect(clippy::unnecessary_wraps, reason = "an unknown processor would have no codes")]
pub fn codes() -> Option<Codes> {
    Some(Codes { instructions: 2, branches: 5, conditional_branches: Some(0x15) })
}

/// Returns `None`: no event takes two counters.
pub fn in_pairs() -> Option<u64> {
    None
}

/// Number of programmable counters that the PMU of the host or a guest has. `cycle` and `instret` are not among them,
/// as they cannot count user mode only.
pub const COUNTERS: usize = 8;

/// True if `perf_event_open` refuses a group of more events than the PMU has counters.
pub const REFUSES_LARGE_GROUPS: bool = false;

/// Maximum difference in kernel instructions between the counters of a group. Each counter is started and stopped by an
/// SBI call of its own.
pub const GROUP_SKEW: u64 = 1000;

/// The file with the setting that allows or forbids programs to read counters directly.
pub const DIRECT_READ_SETTING: &str = "/proc/sys/kernel/perf_user_access";
/// Signal that ends a program that reads a counter directly while the setting forbids it.
pub const DIRECT_READ_SIGNAL: i32 = libc::SIGILL;

/// The user registers in samples, as `sample_regs_user`: pc and all general registers except zero.
pub const REGISTERS: u64 = 0xffff_ffff;
/// Index among them of the loop's counter, t5.
pub const ROUNDS_REGISTER: usize = 30;

/// Number of instructions that `run` executes after its first call and before the loop.
pub const BEFORE_LOOP: u64 = 5;

/// Returns the number of instructions that `run` executes between its calls.
pub const fn instructions(rounds: u64) -> u64 {
    BEFORE_LOOP + 2 * rounds + 1
}

/// Returns how many of these instructions are branches.
pub const fn branches(rounds: u64) -> u64 {
    rounds
}

/// Makes the call `begin`, runs the loop `rounds` times, and makes the call `end`.
#[inline(never)]
pub fn run(begin: Call, rounds: u64, end: Call) -> Result<Loop, Failure> {
    let (first, last, decrement): (i64, i64, u64);
    // SAFETY: the calls enable and disable counters and change no memory of this program. The registers that the code,
    // the kernel and a signal handler change are named here or restored.
    unsafe {
        asm!(
            ".option push",
            ".option norvc",
            "la t4, 2f",
            "ecall",
            "mv t3, a0",
            "mv a7, s2",
            "mv a0, s3",
            "mv a1, s4",
            "mv a2, s5",
            "2:",
            "addi t5, t5, -1",
            "bnez t5, 2b",
            "ecall",
            ".option pop",
            inout("a7") begin.number => _,
            inout("a0") begin.arguments[0] => last,
            inout("a1") begin.arguments[1] => _,
            inout("a2") begin.arguments[2] => _,
            inout("t5") rounds => _,
            in("s2") end.number,
            in("s3") end.arguments[0],
            in("s4") end.arguments[1],
            in("s5") end.arguments[2],
            out("t3") first,
            out("t4") decrement,
        );
    }
    equal("what the call before the loop returned", first, 0)?;
    equal("what the call after the loop returned", last, 0)?;
    Ok(Loop { decrement, jump: decrement + 4 })
}

/// Number of instructions that the parent in `run_in_child` executes between its calls.
pub const PARENT_INSTRUCTIONS: u64 = 20;

/// Returns the number of instructions that the child in `run_in_child` executes.
pub const fn child_instructions(rounds: u64) -> u64 {
    1 + 2 * rounds + 3
}

/// Makes the call `begin`, forks a child that runs the loop and exits, waits for the child, and makes the call `end`.
#[inline(never)]
pub fn run_in_child(begin: Call, rounds: u64, end: Call) -> Result<(), Failure> {
    let (first, waited, last): (i64, i64, i64);
    // SAFETY: as for `run`; the child has its own copy of the memory, uses only registers, and never leaves this code.
    unsafe {
        asm!(
            ".option push",
            ".option norvc",
            "ecall",
            "mv t3, a0",
            "li a0, {child_ended}",
            "li a1, 0",
            "li a2, 0",
            "li a3, 0",
            "li a4, 0",
            "li a7, {clone}",
            "ecall",
            "beqz a0, 2f",
            "li a1, 0",
            "li a2, 0",
            "li a3, 0",
            "li a7, {wait}",
            "ecall",
            "mv t4, a0",
            "mv a7, s2",
            "mv a0, s3",
            "mv a1, s4",
            "mv a2, s5",
            "ecall",
            "j 3f",
            "2:",
            "addi t5, t5, -1",
            "bnez t5, 2b",
            "li a0, 0",
            "li a7, {exit}",
            "ecall",
            "3:",
            ".option pop",
            child_ended = const libc::SIGCHLD,
            clone = const libc::SYS_clone,
            wait = const libc::SYS_wait4,
            exit = const libc::SYS_exit,
            inout("a7") begin.number => _,
            inout("a0") begin.arguments[0] => last,
            inout("a1") begin.arguments[1] => _,
            inout("a2") begin.arguments[2] => _,
            inout("t5") rounds => _,
            in("s2") end.number,
            in("s3") end.arguments[0],
            in("s4") end.arguments[1],
            in("s5") end.arguments[2],
            out("t3") first,
            out("t4") waited,
            out("a3") _,
            out("a4") _,
        );
    }
    equal("what the call before the child returned", first, 0)?;
    equal("there is a child that has ended", waited > 0, true)?;
    equal("what the call after the child returned", last, 0)
}

/// Returns the address at which a signal interrupted this program.
pub fn interrupted_at(context: &libc::ucontext_t) -> u64 {
    context.uc_mcontext.__gregs[libc::REG_PC]
}

/// Runs the loop without a system call around it.
pub fn spin(rounds: u64) {
    // SAFETY: the code changes only the register that is named.
    unsafe {
        asm!("2:", "addi {0}, {0}, -1", "bnez {0}, 2b", inout(reg) rounds => _, options(nomem, nostack));
    }
}

/// Reads the cycle counter without a system call.
pub fn read_counter_zero() {
    // SAFETY: the code changes only the register that is named. If the read is forbidden, a signal ends the program.
    unsafe { asm!("rdcycle {}", out(reg) _, options(nomem, nostack)) }
}
