//! The guest's side of the shared page ([`vpmu::shared_page`]): machine code that replaces the kernel's functions for
//! MSR accesses.
//!
//! Each function first checks whether the register is on the page. If it is not, or if the page is not active, the
//! function jumps to the kernel's own function. The APIC's LVT entry for overflows is always there, and nearly always
//! accessed by the kernel's own function as well. So the code keeps the arguments until it no longer needs to jump
//! there. It uses no stack, and returns through the kernel's own return instruction, which may have mitigations for
//! processor bugs.
//!
//! An NMI can come at any instruction, and its handler may run the same code. So each register has its own slot, and a
//! write is complete when a single instruction sets its dirty bit. At the end the code checks again that the page is
//! active: if the handler has thawed the counters meanwhile, the access is made in the ordinary way.

use std::mem::offset_of;

use iced_x86::code_asm::{
    CodeAssembler, CodeLabel, IcedError, byte_ptr, dword_ptr, eax, ecx, edi, esi, ptr, qword_ptr, r8, r8d,
    r9, r9d, r10, r11, r11d, rax, rcx, rdi, rdx, rsi,
};
use vpmu::shared_page::{ACTIVE, FREEZING, OFFERED, Page, Registers, Stride, THAWED};
use vpmu::x86::X2APIC_LVTPC;

/// The kernel's own functions for MSR accesses. They follow the System V ABI, as all of the kernel's code does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Originals {
    /// Reads the MSR whose number is in EDI.
    pub read: Original,
    /// Writes the MSR whose number is in EDI.
    pub write: Original,
    /// Where [`Originals::write`] takes the value.
    pub value: Value,
    /// Reads the counter whose RDPMC number is in EDI.
    pub read_counter: Original,
}

/// One of the kernel's own functions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Original {
    /// Address of its first instruction.
    pub entry: u64,
    /// Address of an instruction by which it returns, at which its stack frame is gone.
    pub exit: u64,
}

/// Where the value is that is written to an MSR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value {
    /// In RSI.
    Whole,
    /// The lower half in ESI, the upper half in EDX.
    Halves,
}

/// Location of a guest's shared pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageLocation {
    /// The kernel's virtual address of the first CPU's page.
    pub first: u64,
    /// Number of pages, one for each CPU, [`Page::STRIDE`] bytes apart.
    pub count: u32,
}

/// Machine code of the guest's side, for one address.
#[derive(Debug, PartialEq, Eq)]
pub struct Stub {
    /// The code.
    pub code: Vec<u8>,
    /// Address of the function that replaces [`Originals::read`].
    pub read: u64,
    /// Address of the function that replaces [`Originals::write`].
    pub write: u64,
    /// Address of the function that replaces [`Originals::read_counter`].
    pub read_counter: u64,
}

/// Offsets of the page's fields, as displacements of operands.
const ACTIVE_WORD: i32 = displacement(offset_of!(Page, active));
const FREEZING_WORD: i32 = displacement(offset_of!(Page, freezing));
const DIRTY: i32 = displacement(offset_of!(Page, dirty));
const CLEARED: i32 = displacement(offset_of!(Page, cleared));
const THAW: i32 = displacement(offset_of!(Page, thaw));
const THAW_MUST_EXIT: i32 = displacement(offset_of!(Page, thaw_must_exit));
const LVT_ENTRY: i32 = displacement(offset_of!(Page, lvt_entry));
const LVT_MASK: i32 = displacement(offset_of!(Page, lvt_mask));
const WRITTEN: i32 = displacement(offset_of!(Page, written));
const SHOWN: i32 = displacement(offset_of!(Page, shown));
const NO_EXIT_RANGE: i32 = displacement(offset_of!(Page, no_exit_range));

const _: () = assert!(Page::STRIDE.is_power_of_two());

const fn displacement(offset: usize) -> i32 {
    assert!(offset < Page::STRIDE);
    #[expect(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "a page is small")]
    let displacement = offset as i32;
    displacement
}

/// Linux' segment whose limit has the number of the CPU in its lower bits (`__CPUNODE_SEG`, `VDSO_CPUNODE_MASK`).
const CPU_SEGMENT: u32 = 0x7b;
const CPU_MASK: u32 = 0xfff;
/// Mask bit of an APIC's LVT entry.
const LVT_MASKED: u32 = 1 << 16;

type Result<T = ()> = std::result::Result<T, IcedError>;

impl Stub {
    /// Assembles the code for the address `at`. Its length can differ between addresses, because jumps to the kernel's
    /// own functions are as short as possible.
    pub fn new(at: u64, registers: &Registers, originals: &Originals, pages: PageLocation) -> Self {
        Self::assemble(at, registers, originals, pages)
            .expect("all operands can be encoded, and all labels are set")
    }

    fn assemble(at: u64, registers: &Registers, originals: &Originals, pages: PageLocation) -> Result<Self> {
        let mut code = Vec::new();
        let mut add = |function: &dyn Fn(&mut CodeAssembler) -> Result| -> Result<u64> {
            code.resize(code.len().next_multiple_of(16), 0xcc);
            let address = at + code.len() as u64;
            let mut a = CodeAssembler::new(64)?;
            // The target of an indirect call, if the kernel uses indirect branch tracking.
            a.endbr64()?;
            function(&mut a)?;
            code.extend(a.assemble(address)?);
            Ok(address)
        };
        let read = add(&|a| read(a, registers, originals.read, pages))?;
        let read_counter = add(&|a| read_counter(a, registers, originals.read_counter, pages))?;
        let write = add(&|a| write(a, registers, originals, pages))?;
        Ok(Self { code, read, write, read_counter })
    }
}

/// Reads the MSR whose number is in EDI.
fn read(a: &mut CodeAssembler, registers: &Registers, original: Original, pages: PageLocation) -> Result {
    let [mut slot, mut other] = std::array::from_fn(|_| a.create_label());
    find_slot(a, registers, slot, |a| {
        a.cmp(edi, registers.status)?;
        a.jne(other)?;
        a.mov(eax, number(registers.slots.len()))?;
        a.jmp(slot)
    })?;
    a.set_label(&mut slot)?;
    return_shown(a, original, pages)?;

    // KVM's entry has no mask while that is on the page.
    a.set_label(&mut other)?;
    a.cmp(edi, X2APIC_LVTPC)?;
    a.jne(original.entry)?;
    find_page(a, pages, original.entry)?;
    a.mov(rax, rcx + LVT_MASK)?;
    a.test(rax, rax)?;
    a.je(original.entry)?;
    a.cmp(rax, rcx + LVT_ENTRY)?;
    a.jne(original.entry)?;
    a.or(eax, LVT_MASKED)?;
    a.jmp(original.exit)
}

/// Reads the counter whose RDPMC number is in EDI.
fn read_counter(
    a: &mut CodeAssembler,
    registers: &Registers,
    original: Original,
    pages: PageLocation,
) -> Result {
    let mut slot = a.create_label();
    for counters in &registers.counters {
        let mut next = a.create_label();
        compare_index(a, counters.first, counters.count)?;
        a.jae(next)?;
        match counters.stride {
            Stride::One => a.add(eax, counters.slot)?,
            Stride::Two => a.lea(eax, rax * 2 + counters.slot.cast_signed())?,
        }
        a.jmp(slot)?;
        a.set_label(&mut next)?;
    }
    a.jmp(original.entry)?;
    a.set_label(&mut slot)?;
    return_shown(a, original, pages)
}

/// Writes the MSR whose number is in EDI. The masks of the slots follow the code.
fn write(a: &mut CodeAssembler, registers: &Registers, originals: &Originals, pages: PageLocation) -> Result {
    let Original { entry: original, exit } = originals.write;
    let [mut clear, mut control, mut slot, mut entry] = std::array::from_fn(|_| a.create_label());
    let [mut thaw, mut freezing, mut must_exit, mut no_exit, mut masks] =
        std::array::from_fn(|_| a.create_label());
    find_slot(a, registers, slot, |a| {
        a.cmp(edi, registers.clear.register)?;
        a.je(clear)?;
        a.cmp(edi, registers.control)?;
        a.je(control)?;
        a.cmp(edi, X2APIC_LVTPC)?;
        a.jne(original)?;
        a.jmp(entry)
    })?;

    a.set_label(&mut slot)?;
    find_page(a, pages, original)?;
    load_value(a, originals.value)?;
    jump_unless_active(a, original)?;
    // Bits that cannot be written on the page.
    a.lea(r10, ptr(masks))?;
    a.mov(r11d, eax)?;
    a.shl(r11d, 4)?;
    a.test(r10 + r11, r8)?;
    a.jne(original)?;
    // Values that need no thaw with an exit.
    a.mov(r9d, r11d)?;
    a.cmp(r8, rcx + r9 + NO_EXIT_RANGE)?;
    a.jb(must_exit)?;
    a.cmp(r8, rcx + r9 + (NO_EXIT_RANGE + 8))?;
    a.jbe(no_exit)?;
    a.set_label(&mut must_exit)?;
    a.mov(byte_ptr(rcx + THAW_MUST_EXIT), 1)?;
    a.set_label(&mut no_exit)?;
    a.mov(rcx + rax * 8 + WRITTEN, r8)?;
    a.bts(dword_ptr(rcx + DIRTY), eax)?;
    // Bits that a read returns.
    a.and(r8, r10 + r11 + 8)?;
    a.mov(rcx + rax * 8 + SHOWN, r8)?;
    jump_unless_active(a, original)?;
    a.jmp(exit)?;

    a.set_label(&mut clear)?;
    find_page(a, pages, original)?;
    load_value(a, originals.value)?;
    jump_unless_active(a, original)?;
    a.mov(r9, !registers.clear.write_mask)?;
    a.test(r8, r9)?;
    a.jne(original)?;
    a.or(rcx + CLEARED, r8)?;
    a.not(r8)?;
    a.and(rcx + (SHOWN + 8 * number(registers.slots.len()).cast_signed()), r8)?;
    jump_unless_active(a, original)?;
    a.jmp(exit)?;

    a.set_label(&mut control)?;
    find_page(a, pages, original)?;
    load_value(a, originals.value)?;
    a.test(r8, r8)?;
    a.jne(thaw)?;
    exchange_active(a, OFFERED, ACTIVE)?;
    a.jne(freezing)?;
    a.jmp(exit)?;

    a.set_label(&mut thaw)?;
    a.cmp(r8, rcx + THAW)?;
    a.jne(original)?;
    a.cmp(byte_ptr(rcx + THAW_MUST_EXIT), 0)?;
    a.jne(original)?;
    exchange_active(a, ACTIVE, THAWED)?;
    a.jne(original)?;
    a.jmp(exit)?;

    a.set_label(&mut freezing)?;
    a.mov(r8, FREEZING)?;
    a.mov(rcx + FREEZING_WORD, r8)?;
    // The VMM finds the address of the page in R9 at the exit that follows.
    a.mov(r9, rcx)?;
    a.jmp(original)?;

    a.set_label(&mut entry)?;
    find_page(a, pages, original)?;
    load_value(a, originals.value)?;
    // Opens the entry without an exit if only the page masks it. Noted first, a value that KVM has not got yet is none
    // that the VMM would mask.
    a.cmp(r8, rcx + LVT_MASK)?;
    a.mov(rcx + LVT_ENTRY, r8)?;
    a.mov(qword_ptr(rcx + LVT_MASK), 0)?;
    a.jne(original)?;
    a.test(r8, r8)?;
    a.je(original)?;
    a.jmp(exit)?;

    a.set_label(&mut masks)?;
    for slot in &registers.slots {
        a.dq(&[!slot.write_mask, slot.read_mask])?;
    }
    Ok(())
}

/// Jumps to `found` with the slot of the register EDI in EAX, or continues with `or_else`, which must not fall through.
fn find_slot(
    a: &mut CodeAssembler,
    registers: &Registers,
    found: CodeLabel,
    or_else: impl FnOnce(&mut CodeAssembler) -> Result,
) -> Result {
    let mut runs: Vec<_> = registers.number_ranges().into_iter().map(|run| (run, a.create_label())).collect();
    for ((first, _, count), label) in &runs {
        compare_index(a, *first, *count)?;
        a.jb(*label)?;
    }
    or_else(a)?;
    for ((_, slot, _), label) in &mut runs {
        a.set_label(label)?;
        a.add(eax, *slot)?;
        a.jmp(found)?;
    }
    Ok(())
}

/// Sets EAX to EDI minus `first`, and compares it with `count`.
fn compare_index(a: &mut CodeAssembler, first: u32, count: u32) -> Result {
    a.lea(eax, rdi + first.wrapping_neg().cast_signed())?;
    a.cmp(eax, count)
}

/// Returns what the page shows in the slot EAX.
fn return_shown(a: &mut CodeAssembler, original: Original, pages: PageLocation) -> Result {
    find_page(a, pages, original.entry)?;
    jump_unless_active(a, original.entry)?;
    a.mov(r8, rcx + rax * 8 + SHOWN)?;
    jump_unless_active(a, original.entry)?;
    a.mov(rax, r8)?;
    a.jmp(original.exit)
}

/// Sets RCX to the address of this CPU's page, or jumps if the CPU has none. Clobbers R8.
fn find_page(a: &mut CodeAssembler, pages: PageLocation, otherwise: u64) -> Result {
    a.mov(ecx, CPU_SEGMENT)?;
    a.lsl(ecx, ecx)?;
    a.jne(otherwise)?;
    a.and(ecx, CPU_MASK)?;
    a.cmp(ecx, pages.count)?;
    a.jae(otherwise)?;
    a.shl(ecx, Page::STRIDE.ilog2())?;
    a.mov(r8, pages.first)?;
    a.add(rcx, r8)
}

/// Sets R8 to the value to be written. Clobbers R9.
fn load_value(a: &mut CodeAssembler, value: Value) -> Result {
    match value {
        Value::Whole => a.mov(r8, rsi),
        Value::Halves => {
            a.mov(r8d, esi)?;
            a.mov(r9, rdx)?;
            a.shl(r9, 32)?;
            a.or(r8, r9)
        }
    }
}

/// Jumps unless the page is active, to judge by the lower half of the word.
fn jump_unless_active(a: &mut CodeAssembler, otherwise: u64) -> Result {
    a.cmp(dword_ptr(rcx + ACTIVE_WORD), (ACTIVE & 0xffff_ffff) as u32)?;
    a.jne(otherwise)
}

/// Replaces the page's active word in one instruction if it is `from`, and sets ZF if it was. Clobbers RAX and R8.
fn exchange_active(a: &mut CodeAssembler, from: u64, to: u64) -> Result {
    a.mov(rax, from)?;
    a.mov(r8, to)?;
    a.cmpxchg(qword_ptr(rcx + ACTIVE_WORD), r8)
}

fn number(slot: usize) -> u32 {
    u32::try_from(slot).expect("there are few slots")
}
