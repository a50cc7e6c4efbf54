//! The counted code for x86-64.

use std::arch::asm;
use std::arch::x86_64::__cpuid;

use super::{Call, Loop};
use crate::code::Codes;
use crate::failure::{Failure, equal};

const AMD: Codes = Codes { instructions: 0xc0, branches: 0xc2, conditional_branches: Some(0xd1) };
const INTEL: Codes = Codes { instructions: 0xc0, branches: 0xc4, conditional_branches: None };

/// Returns the raw event codes of this processor.
#[expect(clippy::unnecessary_wraps, reason = "an unknown processor would have no codes")]
pub fn codes() -> Option<Codes> {
    /// First four bytes of the vendor's name (CPUID leaf 0, EBX).
    const GENUINE_INTEL: u32 = u32::from_le_bytes(*b"Genu");
    Some(if __cpuid(0).ebx == GENUINE_INTEL { INTEL } else { AMD })
}

/// Returns the raw code of an event that takes two counters, if this processor has one: AMD's floating-point operations
/// (PPR, "Large Increment per Cycle Events").
pub fn in_pairs() -> Option<u64> {
    codes().filter(|codes| codes.branches == AMD.branches).map(|_| 0x03)
}

/// Number of programmable counters that the PMU of the host or a guest has.
pub const COUNTERS: usize = 6;

/// True if `perf_event_open` refuses a group of more events than the PMU has counters.
pub const REFUSES_LARGE_GROUPS: bool = true;

/// Maximum difference in kernel instructions between the counters of a group. One write starts or stops all of them.
pub const GROUP_SKEW: u64 = 0;

/// The file with the setting that allows or forbids programs to read counters directly.
pub const DIRECT_READ_SETTING: &str = "/sys/bus/event_source/devices/cpu/rdpmc";
/// Signal that ends a program that reads a counter directly while the setting forbids it.
pub const DIRECT_READ_SIGNAL: i32 = libc::SIGSEGV;

/// The user registers in samples, as `sample_regs_user`: all general registers, IP, flags, CS and SS.
pub const REGISTERS: u64 = 0x00ff_0fff;
/// Index among them of the loop's counter, R8.
pub const ROUNDS_REGISTER: usize = 12;

/// Number of instructions that `run` executes after its first call and before the loop.
pub const BEFORE_LOOP: u64 = 5;

/// Returns the number of instructions that `run` executes between its calls.
pub const fn instructions(rounds: u64) -> u64 {
    BEFORE_LOOP + 2 * rounds + 1
}

/// Returns how many of these instructions are branches. The system call counts as one.
pub const fn branches(rounds: u64) -> u64 {
    rounds + 1
}

/// Makes the call `begin`, runs the loop `rounds` times, and makes the call `end`.
#[inline(never)]
pub fn run(begin: Call, rounds: u64, end: Call) -> Result<Loop, Failure> {
    let (first, last, decrement): (i64, i64, u64);
    // SAFETY: the calls enable and disable counters and change no memory of this program. The registers that the code,
    // the kernel and a signal handler change are named here or restored.
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
    // `dec r8` is three bytes long.
    Ok(Loop { decrement, jump: decrement + 3 })
}

/// Number of instructions that the parent in `run_in_child` executes between its calls.
pub const PARENT_INSTRUCTIONS: u64 = 17;

/// Returns the number of instructions that the child in `run_in_child` executes.
pub const fn child_instructions(rounds: u64) -> u64 {
    2 + 2 * rounds + 3
}

/// Makes the call `begin`, forks a child that runs the loop and exits, waits for the child, and makes the call `end`.
#[inline(never)]
pub fn run_in_child(begin: Call, rounds: u64, end: Call) -> Result<(), Failure> {
    let (first, waited, last): (i64, i64, i64);
    // SAFETY: as for `run`; the child has its own copy of the memory, uses only registers, and never leaves this code.
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

/// Returns the address at which a signal interrupted this program.
pub fn interrupted_at(context: &libc::ucontext_t) -> u64 {
    context.uc_mcontext.gregs[libc::REG_RIP as usize].cast_unsigned()
}

/// Runs the loop without a system call around it.
pub fn spin(rounds: u64) {
    // SAFETY: the code changes only the register that is named.
    unsafe { asm!("2:", "dec {0}", "jnz 2b", inout(reg) rounds => _, options(nomem, nostack)) }
}

/// Reads counter 0 without a system call.
pub fn read_counter_zero() {
    // SAFETY: the code changes only registers that are named. If the read is forbidden, a signal ends the program.
    unsafe { asm!("rdpmc", in("ecx") 0, out("eax") _, out("edx") _, options(nomem, nostack)) }
}
