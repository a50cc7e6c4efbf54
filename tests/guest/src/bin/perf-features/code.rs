//! Code of known length: what runs in user mode between two system calls, counted instruction by instruction.
//!
//! A counter that the first call switches on and the second one off has seen exactly what is written here. A system call's
//! own instruction is fetched in user mode and counts there, so the second one belongs to it and the first does not.

use std::arch::asm;

use crate::failure::{Failure, equal};

/// A system call with up to three arguments.
#[derive(Clone, Copy)]
pub struct Call {
    number: i64,
    arguments: [u64; 3],
}

impl Call {
    /// An `ioctl` on a descriptor.
    pub fn ioctl(fd: i32, request: u32, argument: u64) -> Self {
        let fd = u64::try_from(fd).expect("descriptors are not negative");
        Self { number: libc::SYS_ioctl, arguments: [fd, request.into(), argument] }
    }

    /// Switches all counters on that this thread has made.
    pub fn enable_all() -> Self {
        Self::prctl(libc::PR_TASK_PERF_EVENTS_ENABLE)
    }

    /// Switches them all off.
    pub fn disable_all() -> Self {
        Self::prctl(libc::PR_TASK_PERF_EVENTS_DISABLE)
    }

    fn prctl(option: i32) -> Self {
        let option = u64::try_from(option).expect("options are not negative");
        Self { number: libc::SYS_prctl, arguments: [option, 0, 0] }
    }
}

/// Where the two instructions of the loop are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loop {
    pub decrement: u64,
    pub jump: u64,
}

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
