//! The guest's side of the shared page ([`vpmu::sbi_page`]): machine code that makes the kernel's calls of the SBI PMU
//! extension on the page, if nothing else is needed, or else by the kernel's own function.
//!
//! The code runs in place of a C function, so it may use all registers that functions need not preserve. A call is made
//! either on the page or by the kernel's function, with the same arguments. Interrupts are disabled meanwhile, so that
//! a handler never finds a page that is half changed.

use std::mem::offset_of;

use vpmu::sbi_page::{ACTIVE, COUNTERS, NO_TRAP, Page};

use super::READ_OVERFLOWS;
use super::assembler::{Assembler, Csr, If, Label};
use super::code;
use super::encode::{RET, addi, ld, sd};
use super::register::Register;

/// What the code has to know of the kernel, as offsets in its image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Surroundings {
    /// The function that makes an SBI call (`__sbi_ecall`).
    pub call: usize,
    /// The first page.
    pub pages: usize,
    /// Number of pages, one for each CPU.
    pub count: u8,
    /// Offset of the CPU's number in the structure that `tp` points to.
    pub cpu: i32,
}

/// The code's functions, and their offsets in the image.
#[derive(Debug, PartialEq, Eq)]
pub struct Stub {
    pub code: Vec<u32>,
    /// Makes a call in place of the kernel's function.
    pub call: usize,
    /// Reads the counter loaded by [`code::counter_number`], in place of the kernel's switch.
    pub read_counter: usize,
    /// Reads `scountovf` to the address in the stack pointer, and keeps all registers except `ra`.
    pub read_overflows: usize,
}

const ZERO: Register = Register::ZERO;
/// The address of this CPU's page, and the CPU's number.
const PAGE: Register = Register::T[0];
const CPU: Register = Register::T[1];
const T2: Register = Register::T[2];
const T3: Register = Register::T[3];
/// The counters that a call is about, and of these, those that it stops.
const SET: Register = Register::T[4];
const STOPPED: Register = Register::T[5];
const T6: Register = Register::T[6];
/// Whether interrupts were enabled. The last argument of these calls is always 0.
const INTERRUPTS: Register = Register::A5;
/// `SIE` in `sstatus`.
const INTERRUPTS_ENABLED: u32 = 1 << 1;

const BASE: Register = Register::A0;
const MASK: Register = Register::A1;
const FLAGS: Register = Register::A2;

// Functions of the SBI's extension, and its errors (SBI specification, chapter 11).
const CONFIG_MATCHING: i32 = 2;
const START: i32 = 3;
const STOP: i32 = 4;
const INVALID_PARAMETER: i32 = -3;
const ALREADY_STOPPED: i32 = -8;
/// The flag of a configuration that sets the counter to 0.
const CLEAR_VALUE: i32 = 1 << 1;

const ACTIVE_WORD: i32 = small(ACTIVE).cast_signed();
const NO_TRAP_CODE: u32 = small(NO_TRAP);
const ANNOUNCEMENT: i32 = small(Page::announcement(0)).cast_signed();
/// The bits of a CSR's number that are the number of the counter.
const COUNTER_MASK: i32 = small(COUNTERS as u64 - 1).cast_signed();

const fn small(number: u64) -> u32 {
    assert!(number < 1 << 31);
    #[expect(clippy::cast_possible_truncation, reason = "checked")]
    let small = number as u32;
    small
}

/// The offset of a field of the page.
macro_rules! field {
    ($name:ident) => {{
        const OFFSET: u32 = displacement(offset_of!(Page, $name));
        OFFSET
    }};
}

const fn displacement(offset: usize) -> u32 {
    assert!(offset < 1 << 11, "an immediate has 12 bits");
    #[expect(clippy::cast_possible_truncation, reason = "checked")]
    let displacement = offset as u32;
    displacement
}

const fn exponent(size: usize) -> u32 {
    assert!(size.is_power_of_two());
    size.ilog2()
}

impl Stub {
    /// Assembles the code for an offset in the image. Returns `None` if something is out of its reach.
    pub fn new(at: usize, around: &Surroundings) -> Option<Self> {
        let mut code = Assembler::new(at);
        let call = code.here();
        make_call(&mut code, around);
        let read_counter = code.here();
        self::read_counter(&mut code, around);
        let read_overflows = code.here();
        self::read_overflows(&mut code, around);
        Some(Self { code: code.finish()?, call, read_counter, read_overflows })
    }
}

fn load(code: &mut Assembler, rd: Register, offset: u32) {
    code.word(ld(rd, offset, PAGE));
}

fn store(code: &mut Assembler, register: Register, offset: u32) {
    code.word(sd(register, offset, PAGE));
}

fn copy(code: &mut Assembler, rd: Register, register: Register) {
    code.word(addi(rd, register, 0));
}

/// Loads the address of this CPU's page into [`PAGE`] and the CPU's number into [`CPU`]. Jumps to `none` if the CPU has
/// no page. Clobbers T2.
fn find_page(code: &mut Assembler, around: &Surroundings, none: Label) {
    code.lw(CPU, around.cpu, Register::TP);
    code.load_immediate(T2, around.count.into());
    code.branch(If::NotLess, CPU, T2, none);
    code.slli(T2, CPU, exponent(Page::STRIDE));
    code.address(PAGE, around.pages);
    code.add(PAGE, PAGE, T2);
}

/// Jumps to `otherwise` unless calls may be made on the page. Clobbers T2 and T3.
fn jump_unless_active(code: &mut Assembler, otherwise: Label) {
    load(code, T2, field!(active));
    code.load_immediate(T3, ACTIVE_WORD);
    code.branch(If::NotEqual, T2, T3, otherwise);
}

/// Jumps to `otherwise` unless no program has run since the entry. Clobbers T2 and T3.
fn jump_if_programs_ran(code: &mut Assembler, otherwise: Label) {
    code.exchange_csr(T2, Csr::Scause, NO_TRAP_CODE);
    load(code, T3, field!(cause));
    code.branch(If::NotEqual, T2, T3, otherwise);
    code.load_immediate(T3, NO_TRAP_CODE.cast_signed());
    store(code, T3, field!(cause));
}

/// Jumps to `otherwise` unless all members of `set` are in a field. Clobbers T2.
fn jump_unless_all(code: &mut Assembler, set: Register, offset: u32, otherwise: Label) {
    load(code, T2, offset);
    code.not(T2, T2);
    code.and(T2, T2, set);
    code.branch_unless_zero(T2, otherwise);
}

fn clear(code: &mut Assembler, set: Register, offset: u32) {
    code.not(T3, set);
    load(code, T2, offset);
    code.and(T2, T2, T3);
    store(code, T2, offset);
}

fn add_to(code: &mut Assembler, set: Register, offset: u32) {
    load(code, T2, offset);
    code.or(T2, T2, set);
    store(code, T2, offset);
}

/// Returns from the call with the value in A1. Needs the error in A0.
fn finish(code: &mut Assembler) {
    code.set_in_csr(Csr::Sstatus, INTERRUPTS);
    code.word(RET);
}

/// Notes that the page was changed. Clobbers T2.
fn changed(code: &mut Assembler) {
    code.load_immediate(T2, 1);
    store(code, T2, field!(changed));
}

fn make_call(code: &mut Assembler, around: &Surroundings) {
    let [exit, plain, config, start, stop] = code.labels();
    code.clear_in_csr(INTERRUPTS, Csr::Sstatus, INTERRUPTS_ENABLED);
    code.andi(INTERRUPTS, INTERRUPTS, INTERRUPTS_ENABLED.cast_signed());
    find_page(code, around, plain);
    jump_unless_active(code, exit);
    for (function, label) in [(CONFIG_MATCHING, config), (START, start), (STOP, stop)] {
        code.load_immediate(T2, function);
        code.branch(If::Equal, Register::A6, T2, label);
    }

    code.set(exit);
    // Interrupts stay as they were while the kernel's function runs.
    code.set_in_csr(Csr::Sstatus, INTERRUPTS);
    code.load_immediate(INTERRUPTS, ANNOUNCEMENT);
    code.add(INTERRUPTS, INTERRUPTS, CPU);
    code.exchange_csr(ZERO, Csr::Scause, NO_TRAP_CODE);
    code.far_jump(T2, ZERO, around.call);
    code.set(plain);
    code.set_in_csr(Csr::Sstatus, INTERRUPTS);
    copy(code, INTERRUPTS, ZERO);
    code.far_jump(T2, ZERO, around.call);

    code.set(stop);
    self::stop(code, exit);
    code.set(start);
    self::start(code, exit);
    code.set(config);
    configure(code, exit);
}

/// Loads the set of counters that a call is about. Jumps to `exit` if there are others than those of the page. Clobbers
/// T2.
fn load_set(code: &mut Assembler, exit: Label) {
    code.load_immediate(T2, 64);
    code.branch(If::NotLess, BASE, T2, exit);
    code.sll(SET, MASK, BASE);
    code.srl(T2, SET, BASE);
    code.branch(If::NotEqual, T2, MASK, exit);
    jump_unless_all(code, SET, field!(all), exit);
}

/// Jumps to `exit` unless the flags are none or the first one. Clobbers T2.
fn check_flags(code: &mut Assembler, exit: Label) {
    code.srli(T2, FLAGS, 1);
    code.branch_unless_zero(T2, exit);
}

fn stop(code: &mut Assembler, exit: Label) {
    let [all_stand, keep] = code.labels();
    check_flags(code, exit);
    code.branch_if_zero(MASK, exit);
    load_set(code, exit);
    load(code, T6, field!(running));
    code.and(STOPPED, T6, SET);
    code.branch_if_zero(STOPPED, all_stand);
    jump_unless_all(code, STOPPED, field!(may_stop), exit);
    jump_if_programs_ran(code, exit);
    code.set(all_stand);
    changed(code);
    code.xor(T6, T6, STOPPED);
    store(code, T6, field!(running));
    code.branch_if_zero(FLAGS, keep);
    clear(code, SET, field!(used));
    clear(code, SET, field!(overflows));
    code.set(keep);
    // The error says whether some of the counters stood still before.
    code.xor(T2, STOPPED, SET);
    code.snez(T2, T2);
    code.sub(T2, ZERO, T2);
    code.andi(BASE, T2, ALREADY_STOPPED);
    copy(code, MASK, ZERO);
    finish(code);
}

fn start(code: &mut Assembler, exit: Label) {
    let [some, resume, is_serving, start] = code.labels();
    check_flags(code, exit);
    code.branch_unless_zero(MASK, some);
    code.load_immediate(BASE, INVALID_PARAMETER);
    copy(code, MASK, ZERO);
    finish(code);

    code.set(some);
    load_set(code, exit);
    jump_unless_all(code, SET, field!(used), exit);
    jump_unless_all(code, SET, field!(may_start), exit);
    load(code, T6, field!(running));
    code.and(T2, T6, SET);
    code.branch_unless_zero(T2, exit);
    code.branch_if_zero(FLAGS, resume);
    // A value is for one counter, whose number is the base.
    code.load_immediate(T2, 1);
    code.branch(If::NotEqual, MASK, T2, exit);
    code.slli(STOPPED, BASE, 4);
    code.add(STOPPED, STOPPED, PAGE);
    code.word(ld(T2, field!(no_exit_values), STOPPED));
    code.branch(If::Equal, Register::A3, T2, is_serving);
    code.word(ld(T2, field!(no_exit_values) + 8, STOPPED));
    code.branch(If::Less, T2, Register::A3, exit);
    code.set(is_serving);
    jump_if_programs_ran(code, exit);
    code.slli(STOPPED, BASE, 3);
    code.add(STOPPED, STOPPED, PAGE);
    code.word(sd(Register::A3, field!(values), STOPPED));
    add_to(code, SET, field!(written));
    code.jump(start);

    code.set(resume);
    jump_unless_all(code, SET, field!(may_resume), exit);
    load(code, T2, field!(written));
    code.and(T2, T2, SET);
    code.branch_unless_zero(T2, exit);
    jump_if_programs_ran(code, exit);
    code.set(start);
    changed(code);
    code.or(T6, T6, SET);
    store(code, T6, field!(running));
    clear(code, SET, field!(overflows));
    copy(code, BASE, ZERO);
    copy(code, MASK, ZERO);
    finish(code);
}

fn configure(code: &mut Assembler, exit: Label) {
    let [next, other, found] = code.labels();
    let configuration = SET;
    code.branch_unless_zero(BASE, exit);
    load(code, T6, field!(all));
    load(code, T2, field!(used));
    code.not(T2, T2);
    code.and(T6, T6, T2);
    code.and(T6, T6, MASK);
    copy(code, configuration, PAGE);
    copy(code, STOPPED, ZERO);
    // T6 has the free counters from number STOPPED on.
    code.set(next);
    code.branch_if_zero(T6, exit);
    code.andi(T2, T6, 1);
    code.branch_if_zero(T2, other);
    for (argument, offset) in [(Register::A3, 8), (Register::A4, 16)] {
        code.word(ld(T2, offset + field!(configurations), configuration));
        code.branch(If::NotEqual, T2, argument, other);
    }
    code.word(ld(T2, field!(configurations), configuration));
    code.branch(If::Equal, T2, FLAGS, found);
    code.set(other);
    code.srli(T6, T6, 1);
    code.word(addi(STOPPED, STOPPED, 1));
    code.word(addi(configuration, configuration, 24));
    code.jump(next);

    code.set(found);
    let keep = code.label();
    changed(code);
    copy(code, MASK, STOPPED);
    code.load_immediate(SET, 1);
    code.sll(SET, SET, STOPPED);
    add_to(code, SET, field!(used));
    clear(code, SET, field!(overflows));
    code.andi(T2, FLAGS, CLEAR_VALUE);
    code.branch_if_zero(T2, keep);
    code.slli(STOPPED, STOPPED, 3);
    code.add(STOPPED, STOPPED, PAGE);
    code.word(sd(ZERO, field!(values), STOPPED));
    add_to(code, SET, field!(written));
    code.set(keep);
    copy(code, BASE, ZERO);
    finish(code);
}

/// Reads the counter in A0. An interrupt between the look at the page and the read of the value does not matter: the
/// kernel would stop counters that it reads.
fn read_counter(code: &mut Assembler, around: &Surroundings) {
    let exit = code.label();
    find_page(code, around, exit);
    jump_unless_active(code, exit);
    code.andi(T6, Register::A0, COUNTER_MASK);
    load(code, SET, field!(all));
    load(code, T2, field!(running));
    code.not(T2, T2);
    code.and(SET, SET, T2);
    code.srl(SET, SET, T6);
    code.andi(SET, SET, 1);
    code.branch_if_zero(SET, exit);
    code.slli(T6, T6, 3);
    code.add(T6, T6, PAGE);
    code.word(ld(Register::A0, field!(values), T6));
    code.word(RET);
    code.set(exit);
    for word in code::read_counter() {
        code.word(word);
    }
}

/// Reads `scountovf` to where SP points to.
fn read_overflows(code: &mut Assembler, around: &Surroundings) {
    const SAVED: [Register; 8] = [Register::A0, Register::A1, Register::A6, Register::A7, PAGE, CPU, T2, T3];
    const FRAME: i32 = 64;
    const { assert!(8 * SAVED.len() == 64) };
    let [exit, done] = code.labels();
    let saved = || SAVED.into_iter().zip((0..).step_by(8));
    code.word(addi(Register::SP, Register::SP, -FRAME));
    for (register, offset) in saved() {
        code.word(sd(register, offset, Register::SP));
    }
    find_page(code, around, exit);
    jump_unless_active(code, exit);
    // The page shows the overflows of counters that stand still.
    load(code, T2, field!(running));
    load(code, T3, field!(all));
    code.and(T2, T2, T3);
    code.branch_unless_zero(T2, exit);
    load(code, Register::A1, field!(overflows));
    code.jump(done);
    code.set(exit);
    for word in code::call(READ_OVERFLOWS) {
        code.word(word);
    }
    code.set(done);
    code.word(sd(Register::A1, FRAME.cast_unsigned(), Register::SP));
    for (register, offset) in saved() {
        code.word(ld(register, offset, Register::SP));
    }
    code.word(addi(Register::SP, Register::SP, FRAME));
    code.word(RET);
}
