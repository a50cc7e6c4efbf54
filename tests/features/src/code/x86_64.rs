//! The code, in the instructions of x86-64.

use std::arch::asm;
use std::arch::x86_64::__cpuid;

use super::{Call, Loop};
use crate::event::Codes;
use crate::failure::{Failure, equal};

const AMD: Codes = Codes { instructions: 0xc0, branches: 0xc2, conditional_branches: Some(0xd1) };
const INTEL: Codes = Codes { instructions: 0xc0, branches: 0xc4, conditional_branches: None };

/// What this processor calls its events.
#[expect(clippy::unnecessary_wraps, reason = "of other processors none are known")]
pub fn codes() -> Option<Codes> {
    /// What the name of the vendor begins with.
    const GENUINE_INTEL: u32 = u32::from_le_bytes(*b"Genu");
    Some(if __cpuid(0).ebx == GENUINE_INTEL { INTEL } else { AMD })
}

/// How many counters the PMU has, of the host or a guest.
pub const COUNTERS: usize = 6;

/// Whether Linux refuses a group that is too large.
pub const REFUSES_LARGE_GROUPS: bool = true;

/// By how many instructions of the kernel counters of a group can differ, as they are switched one after another.
pub const SWITCHED_WITHIN: u64 = 0;

/// Where programs are allowed to read counters themselves, or not.
pub const READS_SWITCH: &str = "/sys/bus/event_source/devices/cpu/rdpmc";
/// What ends a program that does it though it may not.
pub const READ_SIGNAL: i32 = libc::SIGSEGV;

/// What samples have of user mode: all general registers, IP, flags, CS and SS.
pub const REGISTERS: u64 = 0x00ff_0fff;
/// Which of them counts the rounds of the loop down: R8.
pub const ROUNDS_REGISTER: usize = 12;

/// How many instructions `run` executes after its first call and before the loop.
pub const BEFORE_LOOP: u64 = 5;

/// How many instructions `run` executes between its calls.
pub const fn instructions(rounds: u64) -> u64 {
    BEFORE_LOOP + 2 * rounds + 1
}

/// How many of them are branches: the system call is one.
pub const fn branches(rounds: u64) -> u64 {
    rounds + 1
}

/// Makes a call, goes round a loop, makes another call.
#[inline(never)]
pub fn run(begin: Call, rounds: u64, end: Call) -> Result<Loop, Failure> {
    let (first, last, decrement): (i64, i64, u64);
    // SAFETY: the calls switch counters and change no memory of ours; the registers that the code, the kernel and a
    // signal's handler change are named here or restored.
    unsafe {
        asm!(
            "lea r10, [rip + 2f]",
            "syscall",
            "mov r9, rax",
            "mov rax, r12",
            "mov rdi, r13",
            "mov rsi, r14",
            "mov rdx, r15",
            "2:",
            "dec r8",
            "jnz 2b",
            "syscall",
            inout("rax") begin.number => last,
            inout("rdi") begin.arguments[0] => _,
            inout("rsi") begin.arguments[1] => _,
            inout("rdx") begin.arguments[2] => _,
            inout("r8") rounds => _,
            in("r12") end.number,
            in("r13") end.arguments[0],
            in("r14") end.arguments[1],
            in("r15") end.arguments[2],
            out("r9") first,
            out("r10") decrement,
            out("rcx") _,
            out("r11") _,
        );
    }
    equal("what the call before the loop returned", first, 0)?;
    equal("what the call after the loop returned", last, 0)?;
    // `dec r8` has three bytes.
    Ok(Loop { decrement, jump: decrement + 3 })
}

/// How many instructions the parent in `run_in_child` executes between its calls.
pub const PARENT_INSTRUCTIONS: u64 = 17;

/// How many the child executes.
pub const fn child_instructions(rounds: u64) -> u64 {
    2 + 2 * rounds + 3
}

/// Makes a call, forks a child that goes round the loop and exits, waits for it, makes another call.
#[inline(never)]
pub fn run_in_child(begin: Call, rounds: u64, end: Call) -> Result<(), Failure> {
    let (first, waited, last): (i64, i64, i64);
    // SAFETY: as for `run`; the child has its own copy of the memory, uses registers alone, and never leaves this code.
    unsafe {
        asm!(
            "syscall",
            "mov r9, rax",
            "mov eax, {fork}",
            "syscall",
            "test rax, rax",
            "jz 2f",
            "mov rdi, rax",
            "mov esi, 0",
            "mov edx, 0",
            "mov r10d, 0",
            "mov eax, {wait}",
            "syscall",
            "mov r8, rax",
            "mov rdi, r13",
            "mov rsi, r14",
            "mov rdx, r15",
            "mov rax, r12",
            "syscall",
            "jmp 3f",
            "2:",
            "dec r8",
            "jnz 2b",
            "mov edi, 0",
            "mov eax, {exit}",
            "syscall",
            "3:",
            fork = const libc::SYS_fork,
            wait = const libc::SYS_wait4,
            exit = const libc::SYS_exit,
            inout("rax") begin.number => last,
            inout("rdi") begin.arguments[0] => _,
            inout("rsi") begin.arguments[1] => _,
            inout("rdx") begin.arguments[2] => _,
            inout("r8") rounds => waited,
            in("r12") end.number,
            in("r13") end.arguments[0],
            in("r14") end.arguments[1],
            in("r15") end.arguments[2],
            out("r9") first,
            out("r10") _,
            out("rcx") _,
            out("r11") _,
        );
    }
    equal("what the call before the child returned", first, 0)?;
    equal("there is a child that has ended", waited > 0, true)?;
    equal("what the call after the child returned", last, 0)
}

/// Where a signal has interrupted this program.
pub fn interrupted_at(context: &libc::ucontext_t) -> u64 {
    context.uc_mcontext.gregs[libc::REG_RIP as usize].cast_unsigned()
}

/// Goes round the loop, with nothing before and behind it.
pub fn spin(rounds: u64) {
    // SAFETY: changes one register, which is named.
    unsafe { asm!("2:", "dec {0}", "jnz 2b", inout(reg) rounds => _, options(nomem, nostack)) }
}

/// Reads counter 0 without the kernel's help.
pub fn read_counter_zero() {
    // SAFETY: changes registers that are named; if it is forbidden, the program ends here.
    unsafe { asm!("rdpmc", in("ecx") 0, out("eax") _, out("edx") _, options(nomem, nostack)) }
}
