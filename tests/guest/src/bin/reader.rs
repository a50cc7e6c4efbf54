//! Reads a counter of its own instructions with RDPMC, in all the ways in which a program can, and prints what it sees.
//! It must see the same in a guest and on the host.

use std::arch::{asm, global_asm};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use tally_lab::bench::here::{count_instructions, interrupt_the_kernel};
use vpmu_perf::Page;

fn main() -> io::Result<()> {
    catch_faults()?;
    println!("before mapping: {}", outcome(|| rdpmc(0)));
    let counter = OwnedFd::from(count_instructions()?);
    let page = Page::map(&counter)?;
    println!("page: {}", if page.read().is_some() { "read" } else { "not readable" });
    let number = page.hardware().ok_or_else(|| io::Error::other("the event is not on the PMU"))?;
    println!("mapped: {}", outcome(|| rdpmc(number)));
    for rounds in [1, 1000, 1_000_000] {
        println!("{rounds} rounds: {} instructions", around_loop(number, rounds));
    }
    println!("no such counter: {}", outcome(|| rdpmc(63)));
    println!("another fault: {}", outcome(|| load_from_nowhere(number)));
    println!("privileged instruction: {}", outcome(|| disable_interrupts(number)));
    let (before, narrow, after) = (rdpmc(number), in_32_bit_mode(number)?, rdpmc(number));
    println!("32-bit code: {}", if (before..after).contains(&narrow) { "read" } else { "misread" });
    println!("threads: {}", threads()?);
    println!("beside overflows in the kernel: {}", beside_overflows(number)?);
    println!("steps: {:?}", steps()?);
    drop(page);
    println!("unmapped: {}", outcome(|| rdpmc(number)));
    Ok(())
}

static FAULTED: AtomicBool = AtomicBool::new(false);
/// Where the program goes on after a fault.
static RESUME: AtomicU64 = AtomicU64::new(0);

/// Has SIGSEGV continue at [`RESUME`].
fn catch_faults() -> io::Result<()> {
    extern "C" fn resume(_signal: i32, _info: *mut libc::siginfo_t, context: *mut libc::c_void) {
        FAULTED.store(true, Ordering::Relaxed);
        // SAFETY: the kernel passes the context of the fault.
        let context = unsafe { &mut *context.cast::<libc::ucontext_t>() };
        let rip = usize::try_from(libc::REG_RIP).expect("it is an index");
        context.uc_mcontext.gregs[rip] = RESUME.load(Ordering::Relaxed).cast_signed();
    }
    // SAFETY: all zeroes are an action without flags and with an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = resume as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: the handler only changes atomics and the context that it is given.
    match unsafe { libc::sigaction(libc::SIGSEGV, &raw const action, ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns whether an instruction faults.
fn outcome(act: impl FnOnce() -> u64) -> &'static str {
    FAULTED.store(false, Ordering::Relaxed);
    act();
    if FAULTED.load(Ordering::Relaxed) { "fault" } else { "done" }
}

/// Executes an instruction after which the program goes on, even if it faults. ECX has the number of a counter.
macro_rules! may_fault {
    ($instruction:literal, $number:expr) => {{
        let (low, high): (u64, u64);
        // SAFETY: the instructions write to `RESUME` and to the named registers only.
        unsafe {
            asm!(
                "lea rax, [rip + 2f]",
                "mov [{resume}], rax",
                "mov rax, {nowhere}",
                $instruction,
                "2:",
                resume = in(reg) RESUME.as_ptr(),
                // Not a canonical address.
                nowhere = in(reg) 1_u64 << 62,
                in("ecx") $number,
                out("rax") low,
                inout("rdx") 0_u64 => high,
            );
        }
        high << 32 | low
    }};
}

fn rdpmc(number: u32) -> u64 {
    may_fault!("rdpmc", number)
}

fn load_from_nowhere(number: u32) -> u64 {
    may_fault!("mov rax, [rax]", number)
}

fn disable_interrupts(number: u32) -> u64 {
    may_fault!("cli", number)
}

/// Returns the instructions from one RDPMC to the next, with a loop of two instructions for each round between them: 2
/// for each round, the first RDPMC, and three more.
fn around_loop(number: u32, rounds: u64) -> u64 {
    let (low, high, first): (u64, u64, u64);
    // SAFETY: the page is mapped, so the counter can be read; only the named registers change.
    unsafe {
        asm!(
            "rdpmc",
            "shl rdx, 32",
            "or rdx, rax",
            "mov {first}, rdx",
            "2: dec {rounds}",
            "jnz 2b",
            "rdpmc",
            rounds = inout(reg) rounds => _,
            first = out(reg) first,
            in("ecx") number,
            out("rax") low,
            out("rdx") high,
            options(nomem, nostack),
        );
    }
    (high << 32 | low) - first
}

/// Executes RDPMC in 32-bit code.
fn in_32_bit_mode(number: u32) -> io::Result<u64> {
    const SIZE: usize = 4096;
    const NARROW: usize = 0x40;
    const WIDE: usize = 0x60;
    const STACK: usize = 0x100;
    const RETURN: usize = 0x108;
    const TARGET: usize = 0x110;
    // SAFETY: a new mapping at an address of the system's choice.
    let page = unsafe {
        libc::mmap(
            ptr::null_mut(),
            SIZE,
            libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_32BIT,
            -1,
            0,
        )
    };
    if page == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let at = |offset: usize| u32::try_from(page as usize + offset).expect("the mapping is low").to_le_bytes();
    // RDPMC; JMP FAR to the 64-bit code
    let mut narrow = vec![0x0f, 0x33, 0xea];
    narrow.extend(at(WIDE));
    narrow.extend([0x33, 0]);
    // MOV RSP, [STACK]; JMP [RETURN]
    let mut wide = vec![0x48, 0x8b, 0x24, 0x25];
    wide.extend(at(STACK));
    wide.extend([0xff, 0x24, 0x25]);
    wide.extend(at(RETURN));
    // The far pointer to the 32-bit code, with Linux' segment of 32-bit programs.
    let mut target = at(NARROW).to_vec();
    target.extend([0x23, 0]);
    for (offset, code) in [(NARROW, narrow), (WIDE, wide), (TARGET, target)] {
        // SAFETY: the code fits into the page.
        unsafe {
            ptr::copy_nonoverlapping(code.as_ptr(), page.cast::<u8>().wrapping_add(offset), code.len());
        };
    }
    let (low, high): (u64, u64);
    // SAFETY: the code returns to the label, with the stack as it was; RBX and RBP are saved, because the upper halves
    // of registers are undefined after a change of mode.
    unsafe {
        asm!(
            "push rbx",
            "push rbp",
            "lea rax, [rip + 2f]",
            "mov [{page} + {RETURN}], rax",
            "mov [{page} + {STACK}], rsp",
            "jmp fword ptr [{page} + {TARGET}]",
            "2:",
            "pop rbp",
            "pop rbx",
            page = in(reg) page,
            RETURN = const RETURN,
            STACK = const STACK,
            TARGET = const TARGET,
            in("ecx") number,
            out("rax") low,
            out("rdx") high,
            out("rsi") _, out("rdi") _,
            out("r8") _, out("r9") _, out("r10") _, out("r11") _,
            out("r12") _, out("r13") _, out("r14") _, out("r15") _,
        );
    }
    Ok(high << 32 | low & 0xffff_ffff)
}

/// Has four threads read a counter of their own, all at once.
fn threads() -> io::Result<&'static str> {
    let work = || -> io::Result<bool> {
        let counter = OwnedFd::from(count_instructions()?);
        let page = Page::map(&counter)?;
        let mut last = 0;
        for _ in 0..300 {
            let value = page.read().ok_or_else(|| io::Error::other("it cannot be read"))?;
            if value <= last {
                return Ok(false);
            }
            last = value;
            for turn in 0..1000 {
                std::hint::black_box(turn);
            }
        }
        let mut bytes = [0; 8];
        File::from(counter).read_exact(&mut bytes)?;
        Ok(u64::from_ne_bytes(bytes) > last)
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(work)).collect();
        for thread in threads {
            if !thread.join().expect("it does not panic")? {
                return Ok("misread");
            }
        }
        Ok("read")
    })
}

/// Reads the counter again and again while an event of the kernel's instructions overflows. In a guest, it is the
/// kernel that reads for the program: overflows interrupt it wherever it is.
fn beside_overflows(number: u32) -> io::Result<&'static str> {
    /// A prime, so that no place is left out for long, and long enough for a guest not to be slowed down.
    const PERIOD: u64 = 10_007;
    let _overflows = interrupt_the_kernel(PERIOD)?;
    let exact = (0..10_000).all(|_| around_loop(number, 1) == 6);
    Ok(if exact { "read" } else { "misread" })
}

global_asm!(
    ".globl reader_stepped",
    "reader_stepped:",
    "mov ecx, edi",
    "int3",
    "nop",
    "rdpmc",
    "nop",
    "nop",
    "ret",
);

unsafe extern "C" {
    fn reader_stepped(number: u32);
}

/// Executes a program with an RDPMC step by step. Returns the distances from its beginning at which it stops.
fn steps() -> io::Result<Vec<u64>> {
    // SAFETY: this process has only one thread now.
    let child = unsafe { libc::fork() };
    match child {
        -1 => return Err(io::Error::last_os_error()),
        0 => be_stepped(),
        _ => {}
    }
    let begin = reader_stepped as *const () as u64;
    let mut stops = Vec::new();
    let mut status = 0;
    let mut request = libc::PTRACE_CONT;
    loop {
        // SAFETY: the status is written to a variable of this function.
        if unsafe { libc::waitpid(child, &raw mut status, 0) } < 0 {
            return Err(io::Error::last_os_error());
        }
        if !libc::WIFSTOPPED(status) {
            return Ok(stops);
        }
        if libc::WSTOPSIG(status) == libc::SIGTRAP {
            // SAFETY: all zeroes are valid registers.
            let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
            // SAFETY: the child is stopped, and the registers are written to a variable of this function.
            unsafe { libc::ptrace(libc::PTRACE_GETREGS, child, 0, &raw mut registers) };
            let distance = registers.rip.wrapping_sub(begin);
            request = if distance < 16 { libc::PTRACE_SINGLESTEP } else { libc::PTRACE_CONT };
            stops.extend((distance < 16).then_some(distance));
        }
        // SAFETY: the child is stopped.
        unsafe { libc::ptrace(request, child, 0, 0) };
    }
}

/// The child of [`steps`].
fn be_stepped() -> ! {
    // SAFETY: it takes no further arguments.
    unsafe { libc::ptrace(libc::PTRACE_TRACEME) };
    let code = match count_instructions().map(OwnedFd::from).and_then(|counter| {
        let page = Page::map(&counter)?;
        page.hardware().ok_or_else(|| io::Error::other("no counter")).map(|number| {
            // SAFETY: it changes only registers that functions may change, and the counter can be read.
            unsafe { reader_stepped(number) };
        })
    }) {
        Ok(()) => 0,
        Err(_) => 1,
    };
    // SAFETY: the child of a fork may end so.
    unsafe { libc::_exit(code) }
}
