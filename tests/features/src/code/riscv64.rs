//! The code, in the instructions of RISC-V.

use std::arch::asm;

use super::{Call, Loop};
use crate::event::Codes;
use crate::failure::{Failure, equal};

/// What the simulated host's processor calls its events, and so its guests: each processor has names of its own.
#[expect(clippy::unnecessary_wraps, reason = "of other processors none are known")]
pub fn codes() -> Option<Codes> {
    Some(Codes { instructions: 2, branches: 5, conditional_branches: Some(0x15) })
}

/// How many counters the PMU has, of the host or a guest, beside `cycle` and `instret`, which cannot count in user mode only.
pub const COUNTERS: usize = 8;

/// Whether Linux refuses a group that is too large.
pub const REFUSES_LARGE_GROUPS: bool = false;

/// By how many instructions of the kernel counters of a group can differ: each is started and stopped by a call of its own.
pub const SWITCHED_WITHIN: u64 = 1000;

/// Where programs are allowed to read counters themselves, or not.
pub const READS_SWITCH: &str = "/proc/sys/kernel/perf_user_access";
/// What ends a program that does it though it may not.
pub const READ_SIGNAL: i32 = libc::SIGILL;

/// What samples have of user mode: the program counter and all general registers but zero.
pub const REGISTERS: u64 = 0xffff_ffff;
/// Which of them counts the rounds of the loop down: t5.
pub const ROUNDS_REGISTER: usize = 30;

/// How many instructions `run` executes after its first call and before the loop.
pub const BEFORE_LOOP: u64 = 5;

/// How many instructions `run` executes between its calls.
pub const fn instructions(rounds: u64) -> u64 {
    BEFORE_LOOP + 2 * rounds + 1
}

/// How many of them are branches.
pub const fn branches(rounds: u64) -> u64 {
    rounds
}

/// Makes a call, goes round a loop, makes another call.
#[inline(never)]
pub fn run(begin: Call, rounds: u64, end: Call) -> Result<Loop, Failure> {
    let (first, last, decrement): (i64, i64, u64);
    // SAFETY: the calls switch counters and change no memory of ours; the registers that the code, the kernel and a
    // signal's handler change are named here or restored.
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

/// How many instructions the parent in `run_in_child` executes between its calls.
pub const PARENT_INSTRUCTIONS: u64 = 20;

/// How many the child executes.
pub const fn child_instructions(rounds: u64) -> u64 {
    1 + 2 * rounds + 3
}

/// Makes a call, forks a child that goes round the loop and exits, waits for it, makes another call.
#[inline(never)]
pub fn run_in_child(begin: Call, rounds: u64, end: Call) -> Result<(), Failure> {
    let (first, waited, last): (i64, i64, i64);
    // SAFETY: as for `run`; the child has its own copy of the memory, uses registers alone, and never leaves this code.
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

/// Where a signal has interrupted this program.
pub fn interrupted_at(context: &libc::ucontext_t) -> u64 {
    context.uc_mcontext.__gregs[libc::REG_PC]
}

/// Goes round the loop, with nothing before and behind it.
pub fn spin(rounds: u64) {
    // SAFETY: changes one register, which is named.
    unsafe {
        asm!("2:", "addi {0}, {0}, -1", "bnez {0}, 2b", inout(reg) rounds => _, options(nomem, nostack));
    }
}

/// Reads the counter of cycles without the kernel's help.
pub fn read_counter_zero() {
    // SAFETY: changes a register that is named; if it is forbidden, the program ends here.
    unsafe { asm!("rdcycle {}", out(reg) _, options(nomem, nostack)) }
}
