//! The guest's side of the shared page ([`vpmu::shared_page`]): machine code that replaces the kernel's functions for
//! MSR accesses.
//!
//! Each function first checks whether the register is on the page. If it is not, or if the page is not active, the
//! function jumps to the kernel's own function. So the code keeps the arguments until it no longer needs to jump there.
//! It uses no stack, and returns through the kernel's own return instruction, which may have mitigations for processor
//! bugs.
//!
//! An NMI can come at any instruction, and its handler may run the same code. So each register has its own slot, and a
//! write is complete when a single instruction sets its dirty bit. At the end the code checks again that the page is
//! active: if the handler has thawed the counters meanwhile, the access is made in the ordinary way.

use std::mem::offset_of;

use vpmu::shared_page::{ACTIVE, OFFERED, PASSED, Page, Registers, Stride, THAWED};
use vpmu::x86::OVERFLOW_ENTRY;

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

/// Where a guest's shared pages are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
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

impl Stub {
    /// Assembles the code for the address `at`.
    pub fn new(at: u64, registers: &Registers, originals: &Originals, place: Place) -> Self {
        let mut asm = Assembler { at, code: Vec::new(), jumps: Vec::new(), places: Vec::new() };
        let masks = asm.label();
        let write = asm.write(registers, originals, place, masks);
        let read = asm.read(registers, originals.read, place);
        let read_counter = asm.read_counter(registers, originals.read_counter, place);
        asm.bind(masks);
        for slot in &registers.slots {
            asm.bytes(&(!slot.accepts).to_le_bytes());
            asm.bytes(&slot.keeps.to_le_bytes());
        }
        Self { code: asm.finish(), read, write, read_counter }
    }
}

/// A place in the code, or outside of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Target {
    Label(usize),
    Address(u64),
}

/// The second byte of a conditional jump.
#[derive(Clone, Copy)]
enum If {
    Below = 0x82,
    NotBelow = 0x83,
    Equal = 0x84,
    NotEqual = 0x85,
    NotAbove = 0x86,
}

struct Assembler {
    at: u64,
    code: Vec<u8>,
    /// Four bytes that say how far it is from behind them.
    jumps: Vec<(usize, Target)>,
    places: Vec<Option<u64>>,
}

const ACTIVE_AT: usize = offset_of!(Page, active);
const PASSED_AT: u8 = small(offset_of!(Page, passed));
const DIRTY: u8 = small(offset_of!(Page, dirty));
const CLEARED: u8 = small(offset_of!(Page, cleared));
const THAW: u8 = small(offset_of!(Page, thaw));
const MATTERS: u8 = small(offset_of!(Page, matters));
const ENTRY: u8 = small(offset_of!(Page, entry));
const WRITTEN: u8 = small(offset_of!(Page, written));
#[expect(clippy::cast_possible_truncation, reason = "a page is small")]
const SHOWN: u32 = offset_of!(Page, shown) as u32;
#[expect(clippy::cast_possible_truncation, reason = "a page is small")]
const FREE: u32 = offset_of!(Page, free) as u32;
const _: () = assert!(ACTIVE_AT == 0 && Page::STRIDE == 1 << STRIDE_SHIFT);
const STRIDE_SHIFT: u8 = 10;
/// Linux' segment whose limit says which CPU this is, in its lower bits (`__CPUNODE_SEG`, `VDSO_CPUNODE_MASK`).
const CPU_SEGMENT: u32 = 0x7b;
const CPU_MASK: u32 = 0xfff;

/// An offset as instructions have it in one byte.
const fn small(offset: usize) -> u8 {
    assert!(offset < 0x80);
    #[expect(clippy::cast_possible_truncation, reason = "it was looked at")]
    let small = offset as u8;
    small
}

impl Assembler {
    fn write(&mut self, registers: &Registers, originals: &Originals, place: Place, masks: Target) -> u64 {
        let (original, status) = (originals.write, registers.slots.len());
        let original_entry = Target::Address(original.entry);
        let (clear, control, slot, entry) = (self.label(), self.label(), self.label(), self.label());
        let (thaw, passes, matters, free) = (self.label(), self.label(), self.label(), self.label());
        let begin = self.begin();
        self.find_slot(registers, slot, |asm| {
            asm.compare_edi(registers.clear.register);
            asm.jump_if(If::Equal, clear);
            asm.compare_edi(registers.control);
            asm.jump_if(If::Equal, control);
            asm.compare_edi(OVERFLOW_ENTRY);
            asm.jump_if(If::NotEqual, original_entry);
            asm.jump(entry);
        });

        self.bind(slot);
        self.find_page(place, original_entry);
        self.load_value(originals.value);
        self.unless_active(original_entry);
        self.bytes(&[0x4c, 0x8d, 0x15]); // lea r10, [rip + masks]
        self.distance(masks);
        self.bytes(&[0x41, 0x89, 0xc3]); // mov r11d, eax
        self.bytes(&[0x41, 0xc1, 0xe3, 4]); // shl r11d, 4
        self.bytes(&[0x4f, 0x85, 0x04, 0x1a]); // test [r10 + r11], r8
        self.jump_if(If::NotEqual, original_entry);
        self.bytes(&[0x45, 0x89, 0xd9]); // mov r9d, r11d
        self.bytes(&[0x4e, 0x3b, 0x84, 0x09]); // cmp r8, [rcx + r9 + FREE]
        self.bytes(&FREE.to_le_bytes());
        self.jump_if(If::Below, matters);
        self.bytes(&[0x4e, 0x3b, 0x84, 0x09]); // cmp r8, [rcx + r9 + FREE + 8]
        self.bytes(&(FREE + 8).to_le_bytes());
        self.jump_if(If::NotAbove, free);
        self.bind(matters);
        self.bytes(&[0xc6, 0x41, MATTERS, 1]); // mov byte [rcx + MATTERS], 1
        self.bind(free);
        self.bytes(&[0x4c, 0x89, 0x44, 0xc1, WRITTEN]); // mov [rcx + 8 * rax + WRITTEN], r8
        self.bytes(&[0x0f, 0xab, 0x41, DIRTY]); // bts dword [rcx + DIRTY], eax
        self.bytes(&[0x4f, 0x23, 0x44, 0x1a, 8]); // and r8, [r10 + r11 + 8]
        self.bytes(&[0x4c, 0x89, 0x84, 0xc1]); // mov [rcx + 8 * rax + SHOWN], r8
        self.bytes(&SHOWN.to_le_bytes());
        self.unless_active(original_entry);
        self.jump(Target::Address(original.exit));

        self.bind(clear);
        self.find_page(place, original_entry);
        self.load_value(originals.value);
        self.unless_active(original_entry);
        self.bytes(&[0x49, 0xb9]); // mov r9, what it does not accept
        self.bytes(&(!registers.clear.accepts).to_le_bytes());
        self.bytes(&[0x4d, 0x85, 0xc8]); // test r8, r9
        self.jump_if(If::NotEqual, original_entry);
        self.bytes(&[0x4c, 0x09, 0x41, CLEARED]); // or [rcx + CLEARED], r8
        self.bytes(&[0x49, 0xf7, 0xd0]); // not r8
        self.bytes(&[0x4c, 0x21, 0x81]); // and [rcx + the status], r8
        self.bytes(&(SHOWN + 8 * number(status)).to_le_bytes());
        self.unless_active(original_entry);
        self.jump(Target::Address(original.exit));

        self.bind(control);
        self.find_page(place, original_entry);
        self.load_value(originals.value);
        self.bytes(&[0x4d, 0x85, 0xc0]); // test r8, r8
        self.jump_if(If::NotEqual, thaw);
        self.go_over(OFFERED, ACTIVE, passes);
        self.jump(Target::Address(original.exit));

        self.bind(thaw);
        self.bytes(&[0x4c, 0x3b, 0x41, THAW]); // cmp r8, [rcx + THAW]
        self.jump_if(If::NotEqual, original_entry);
        self.bytes(&[0x80, 0x79, MATTERS, 0]); // cmp byte [rcx + MATTERS], 0
        self.jump_if(If::NotEqual, original_entry);
        self.go_over(ACTIVE, THAWED, original_entry);
        self.jump(Target::Address(original.exit));

        self.bind(passes);
        self.bytes(&[0x49, 0xb8]); // mov r8, PASSED
        self.bytes(&PASSED.to_le_bytes());
        self.bytes(&[0x4c, 0x89, 0x41, PASSED_AT]); // mov [rcx + PASSED_AT], r8
        // Whoever takes the exit that follows finds there which page it is.
        self.bytes(&[0x49, 0x89, 0xc9]); // mov r9, rcx
        self.jump(original_entry);

        self.bind(entry);
        self.find_page(place, original_entry);
        self.load_value(originals.value);
        self.bytes(&[0x4c, 0x89, 0x41, ENTRY]); // mov [rcx + ENTRY], r8
        self.jump(original_entry);
        begin
    }

    fn read(&mut self, registers: &Registers, original: Original, place: Place) -> u64 {
        let slot = self.label();
        let begin = self.begin();
        self.find_slot(registers, slot, |asm| {
            asm.compare_edi(registers.status);
            asm.jump_if(If::NotEqual, Target::Address(original.entry));
            asm.bytes(&[0xb8]); // mov eax, the status' slot
            asm.bytes(&number(registers.slots.len()).to_le_bytes());
            asm.jump(slot);
        });
        self.bind(slot);
        self.show(original, place);
        begin
    }

    fn read_counter(&mut self, registers: &Registers, original: Original, place: Place) -> u64 {
        let slot = self.label();
        let begin = self.begin();
        for counters in &registers.counters {
            let next = self.label();
            self.index(counters.first, counters.count, If::NotBelow, next);
            match counters.stride {
                Stride::One => self.bytes(&[0x05]),             // add eax, slot
                Stride::Two => self.bytes(&[0x8d, 0x04, 0x45]), // lea eax, [2 * rax + slot]
            }
            self.bytes(&counters.slot.to_le_bytes());
            self.jump(slot);
            self.bind(next);
        }
        self.jump(Target::Address(original.entry));
        self.bind(slot);
        self.show(original, place);
        begin
    }

    /// Where a function begins: with what indirect calls have to find there (ENDBR64), if the processor guards them.
    fn begin(&mut self) -> u64 {
        self.code.resize(self.code.len().next_multiple_of(16), 0xcc);
        let begin = self.here();
        self.bytes(&[0xf3, 0x0f, 0x1e, 0xfa]);
        begin
    }

    /// To `found` with the slot of the register EDI in EAX, or to what else there is.
    fn find_slot(&mut self, registers: &Registers, found: Target, or_else: impl FnOnce(&mut Self)) {
        let runs = registers.runs();
        let labels: Vec<Target> = runs.iter().map(|_| self.label()).collect();
        for ((first, _, count), label) in runs.iter().zip(&labels) {
            self.index(*first, *count, If::Below, *label);
        }
        or_else(self);
        for ((_, slot, _), label) in runs.iter().zip(&labels) {
            self.bind(*label);
            self.bytes(&[0x05]); // add eax, slot
            self.bytes(&slot.to_le_bytes());
            self.jump(found);
        }
    }

    /// Has EDI's distance to a number in EAX, and jumps if it is or is not below the count.
    fn index(&mut self, first: u32, count: u32, condition: If, to: Target) {
        self.bytes(&[0x8d, 0x87]); // lea eax, [rdi - first]
        self.bytes(&first.wrapping_neg().to_le_bytes());
        self.bytes(&[0x3d]); // cmp eax, count
        self.bytes(&count.to_le_bytes());
        self.jump_if(condition, to);
    }

    /// Returns what is shown in the slot EAX.
    fn show(&mut self, original: Original, place: Place) {
        let otherwise = Target::Address(original.entry);
        self.find_page(place, otherwise);
        self.unless_active(otherwise);
        self.bytes(&[0x4c, 0x8b, 0x84, 0xc1]); // mov r8, [rcx + 8 * rax + SHOWN]
        self.bytes(&SHOWN.to_le_bytes());
        self.unless_active(otherwise);
        self.bytes(&[0x4c, 0x89, 0xc0]); // mov rax, r8
        self.jump(Target::Address(original.exit));
    }

    /// Has this CPU's page in RCX. R8 is lost.
    fn find_page(&mut self, place: Place, otherwise: Target) {
        self.bytes(&[0xb9]); // mov ecx, CPU_SEGMENT
        self.bytes(&CPU_SEGMENT.to_le_bytes());
        self.bytes(&[0x0f, 0x03, 0xc9]); // lsl ecx, ecx
        self.jump_if(If::NotEqual, otherwise);
        self.bytes(&[0x81, 0xe1]); // and ecx, CPU_MASK
        self.bytes(&CPU_MASK.to_le_bytes());
        self.bytes(&[0x81, 0xf9]); // cmp ecx, count
        self.bytes(&place.count.to_le_bytes());
        self.jump_if(If::NotBelow, otherwise);
        self.bytes(&[0xc1, 0xe1, STRIDE_SHIFT]); // shl ecx, STRIDE_SHIFT
        self.bytes(&[0x49, 0xb8]); // mov r8, first
        self.bytes(&place.first.to_le_bytes());
        self.bytes(&[0x4c, 0x01, 0xc1]); // add rcx, r8
    }

    /// Has what is to be written in R8. R9 is lost.
    fn load_value(&mut self, value: Value) {
        match value {
            Value::Whole => self.bytes(&[0x49, 0x89, 0xf0]), // mov r8, rsi
            Value::Halves => {
                self.bytes(&[0x41, 0x89, 0xf0]); // mov r8d, esi
                self.bytes(&[0x49, 0x89, 0xd1]); // mov r9, rdx
                self.bytes(&[0x49, 0xc1, 0xe1, 32]); // shl r9, 32
                self.bytes(&[0x4d, 0x09, 0xc8]); // or r8, r9
            }
        }
    }

    fn unless_active(&mut self, otherwise: Target) {
        self.bytes(&[0x81, 0x39]); // cmp dword [rcx + ACTIVE_AT], the lower half of ACTIVE
        self.bytes(&ACTIVE.to_le_bytes()[..4]);
        self.jump_if(If::NotEqual, otherwise);
    }

    /// Has the page say something else, if it says the first. No NMI comes between. RAX and R8 are lost.
    fn go_over(&mut self, from: u64, to: u64, otherwise: Target) {
        self.bytes(&[0x48, 0xb8]); // mov rax, from
        self.bytes(&from.to_le_bytes());
        self.bytes(&[0x49, 0xb8]); // mov r8, to
        self.bytes(&to.to_le_bytes());
        self.bytes(&[0x4c, 0x0f, 0xb1, 0x01]); // cmpxchg [rcx + ACTIVE_AT], r8
        self.jump_if(If::NotEqual, otherwise);
    }

    fn compare_edi(&mut self, number: u32) {
        self.bytes(&[0x81, 0xff]); // cmp edi, number
        self.bytes(&number.to_le_bytes());
    }

    fn jump(&mut self, to: Target) {
        self.bytes(&[0xe9]);
        self.distance(to);
    }

    fn jump_if(&mut self, condition: If, to: Target) {
        self.bytes(&[0x0f, condition as u8]);
        self.distance(to);
    }

    fn distance(&mut self, to: Target) {
        self.jumps.push((self.code.len(), to));
        self.bytes(&[0; 4]);
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.code.extend_from_slice(bytes);
    }

    fn here(&self) -> u64 {
        self.at + self.code.len() as u64
    }

    fn label(&mut self) -> Target {
        self.places.push(None);
        Target::Label(self.places.len() - 1)
    }

    fn bind(&mut self, label: Target) {
        let here = self.here();
        if let Target::Label(label) = label {
            self.places[label] = Some(here);
        }
    }

    fn finish(mut self) -> Vec<u8> {
        for (at, target) in self.jumps {
            let target = match target {
                Target::Label(label) => self.places[label].expect("every label is bound"),
                Target::Address(address) => address,
            };
            let behind = self.at + at as u64 + 4;
            #[expect(clippy::cast_possible_truncation, reason = "the kernel's text is smaller than 2 GiB")]
            let distance = target.wrapping_sub(behind) as u32;
            self.code[at..at + 4].copy_from_slice(&distance.to_le_bytes());
        }
        self.code
    }
}

fn number(slot: usize) -> u32 {
    u32::try_from(slot).expect("there are few slots")
}
