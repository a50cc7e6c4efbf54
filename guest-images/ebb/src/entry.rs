//! Where a thread goes on when it is branched. Nothing of the thread's may be changed: not the 128 bytes below its
//! stack pointer, which belong to the function that was interrupted, no register and no flag.

use std::arch::x86_64::{__cpuid_count, _xgetbv};
use std::arch::{asm, global_asm};
use std::sync::atomic::Ordering::Relaxed;

use crate::block::{Page, RETURN, STATE};

/// What a handler is told: where the thread was.
#[derive(Debug, Clone, Copy)]
pub struct Branch {
    /// The instruction at which the thread goes on after the handler.
    pub instruction: u64,
    /// The thread's stack pointer there.
    pub stack: u64,
    /// The thread's frame pointer there, if it uses one: RBP.
    pub frame: u64,
}

/// A handler: it is given the branch, and the program's argument.
pub type Handler = extern "C" fn(&Branch, usize);

/// Components of the processor's state that a handler may change: x87, SSE, AVX, AVX-512.
const COMPONENTS: u64 = 0b1110_0111;

/// What the entry pushes, from the last to the first.
#[repr(C)]
struct Frame {
    rbp: u64,
    rbx: u64,
    /// R11 to R8, RDI, RSI, RDX, RCX, RAX, and the flags.
    others: [u64; 10],
    instruction: u64,
}

const RED_ZONE: u64 = 128;

// A branch may come again from the call of `dispatch` on: everything it needs is on the stack by then, and `ret` takes
// the address from there.
global_asm!(
    ".globl tally_ebb_entry_of_rust",
    ".type tally_ebb_entry_of_rust, @function",
    "tally_ebb_entry_of_rust:",
    "lea rsp, [rsp - {red_zone}]",
    "push qword ptr gs:[{ret}]",
    "pushfq",
    "cld",
    "push rax",
    "push rcx",
    "push rdx",
    "push rsi",
    "push rdi",
    "push r8",
    "push r9",
    "push r10",
    "push r11",
    "push rbx",
    "push rbp",
    "mov rdi, rsp",
    "mov rbp, rsp",
    "sub rsp, qword ptr gs:[{state} + 8]",
    "and rsp, -64",
    // XRSTOR wants the header to be zero, but for the word that XSAVE writes.
    "xor eax, eax",
    "mov ebx, 512",
    "2: mov qword ptr [rsp + rbx], rax",
    "add ebx, 8",
    "cmp ebx, 576",
    "jne 2b",
    // In a child that the handler has made, the block is empty.
    "mov ebx, dword ptr gs:[{state}]",
    "mov eax, ebx",
    "xor edx, edx",
    "xsave64 [rsp]",
    "call {dispatch}",
    "mov eax, ebx",
    "xor edx, edx",
    "xrstor64 [rsp]",
    "mov rsp, rbp",
    "pop rbp",
    "pop rbx",
    "pop r11",
    "pop r10",
    "pop r9",
    "pop r8",
    "pop rdi",
    "pop rsi",
    "pop rdx",
    "pop rcx",
    "pop rax",
    "popfq",
    "ret {red_zone}",
    ".size tally_ebb_entry_of_rust, . - tally_ebb_entry_of_rust",
    red_zone = const RED_ZONE,
    ret = const RETURN,
    state = const STATE,
    dispatch = sym dispatch,
);

unsafe extern "C" {
    fn tally_ebb_entry_of_rust();
}

/// Address of the entry.
pub fn address() -> u64 {
    tally_ebb_entry_of_rust as *const () as u64
}

/// Returns the components of the processor's state that are saved, and how many bytes they need.
pub fn state() -> [u64; 2] {
    // SAFETY: all processors since 2011 have XSAVE, and hypervisors show it; without it there is no AVX to save either,
    // and this program would have ended at its first use.
    let enabled = unsafe { xgetbv() };
    let components = enabled & COMPONENTS;
    // The first two are in the legacy region, which the header follows. CPUID says where the others are.
    let end = |component| {
        let place = __cpuid_count(0xd, component);
        u64::from(place.ebx) + u64::from(place.eax)
    };
    let others = (2..64).filter(|component| components & 1 << component != 0);
    [components, others.map(end).max().unwrap_or(0).max(576)]
}

#[target_feature(enable = "xsave")]
fn xgetbv() -> u64 {
    // SAFETY: register 0 is there wherever XGETBV is.
    unsafe { _xgetbv(0) }
}

/// Calls the program's handler, and enables branches again.
extern "C" fn dispatch(frame: &Frame) {
    // SAFETY: the entry was branched to because the thread has a block.
    let page = unsafe { Page::of_caller() };
    let stack = std::ptr::from_ref(frame).addr() as u64 + size_of::<Frame>() as u64 + RED_ZONE;
    let branch = Branch { instruction: frame.instruction, stack, frame: frame.rbp };
    loop {
        call(page, &branch);
        if !page.enable_or_take() {
            return;
        }
    }
}

/// Enables branches, and handles the overflows that came while they were disabled.
pub fn enable(page: &Page) {
    while page.enable_or_take() {
        let (instruction, stack, frame): (u64, u64, u64);
        // SAFETY: reads registers only.
        unsafe {
            asm!("lea {}, [rip]", "mov {}, rsp", "mov {}, rbp", out(reg) instruction, out(reg) stack, out(reg) frame);
        }
        call(page, &Branch { instruction, stack, frame });
    }
}

/// Handles an overflow for which this library's code was not branched to by now, if it should have been.
pub fn take_late(page: &Page) {
    if page.is_enabled() && page.is_pending() && page.has_handler(address()) {
        enable(page);
    }
}

fn call(page: &Page, branch: &Branch) {
    page.acknowledge();
    let word = |number: usize| usize::try_from(page.call[number].load(Relaxed)).expect("64 bits");
    let (handler, argument) = (word(0), word(1));
    if handler != 0 {
        // SAFETY: the library has stored a handler there, or nothing.
        let handler = unsafe { std::mem::transmute::<usize, Handler>(handler) };
        handler(branch, argument);
    }
}
