//! The code that is put into a kernel, at any address: what calls user space by SBI.
//!
//! An SBI call takes its extension in a7, its function in a6, and returns an error in a0 and a value in a1; all other
//! registers it preserves (SBI specification, "Binary Encoding").

use super::distance::{JUMP, SHORT_JUMP};
use super::register::Register;
use super::{EXTENSION, READ_COUNTER, READ_OVERFLOWS};

/// The first of the counters' CSRs.
pub const FIRST_COUNTER: u16 = 0xc00;
const ECALL: u32 = 0x0000_0073;
/// How far below a multiple of 4096 the extension's id is, and the SBI PMU extension's, too.
pub const ID_LOW: i32 = -683;
/// What LUI takes to get to [`EXTENSION`].
pub const ID_HIGH: u32 = 0x9505;

const _: () = assert!(((ID_HIGH as u64) << 12) - 683 == EXTENSION);

/// LUI: loads the high 20 bits.
pub fn lui(rd: Register, high: u32) -> u32 {
    0x37 | rd.number() << 7 | high << 12
}

/// ADDI.
pub fn addi(rd: Register, rs1: Register, immediate: i32) -> u32 {
    0x13 | rd.number() << 7 | rs1.number() << 15 | immediate.cast_unsigned() << 20
}

fn add(rd: Register, rs1: Register, rs2: Register) -> u32 {
    0x33 | rd.number() << 7 | rs1.number() << 15 | rs2.number() << 20
}

fn ld(rd: Register, offset: u32, base: Register) -> u32 {
    0x3003 | rd.number() << 7 | base.number() << 15 | offset << 20
}

fn sd(rs2: Register, offset: u32, base: Register) -> u32 {
    0x3023 | base.number() << 15 | rs2.number() << 20 | (offset & 0x1f) << 7 | offset >> 5 << 25
}

/// A function's return.
pub const RET: u32 = 0x0000_8067;
/// The same in two bytes.
pub const SHORT_RET: u16 = 0x8082;

/// J from one offset to another, unless it is too far.
pub fn jump(from: usize, to: usize) -> Option<u32> {
    Some(0x6f | JUMP.scatter(distance(from, to)?)?)
}

/// The same in two bytes.
pub fn short_jump(from: usize, to: usize) -> Option<u16> {
    u16::try_from(0xa001 | SHORT_JUMP.scatter(distance(from, to)?)?).ok()
}

fn distance(from: usize, to: usize) -> Option<i64> {
    i64::try_from(to).ok()?.checked_sub(i64::try_from(from).ok()?)
}

/// Makes the call.
fn call(function: u64) -> [u32; 4] {
    let function = i32::try_from(function).expect("a function's number fits an immediate");
    [
        addi(Register::A6, Register::ZERO, function),
        lui(Register::A7, ID_HIGH),
        addi(Register::A7, Register::A7, ID_LOW),
        ECALL,
    ]
}

/// What a read of this counter's CSR becomes in the kernel's switch: it says which one, for [`read_counter`].
pub fn counter_number(csr: u16) -> u32 {
    // An immediate has a sign, and the numbers are beyond what it reaches.
    addi(Register::A0, Register::ZERO, i32::from(csr) - WRAP)
}

/// What an immediate's numbers repeat after.
const WRAP: i32 = 1 << 12;

/// Reads the counter that [`counter_number`] names, and returns from the kernel's function with its value.
pub fn read_counter() -> Vec<u32> {
    let number = [lui(Register::A7, 1), add(Register::A0, Register::A0, Register::A7)];
    let value = [addi(Register::A0, Register::A1, 0), RET];
    [number.as_slice(), &call(READ_COUNTER), &value].concat()
}

/// How long [`read_overflows`] is.
pub const READ_OVERFLOWS_LEN: usize = 16 * 4;

/// Reads which counters have overflowed into a register, touches no other, and goes back to behind the site that came
/// here. None if that is too far.
pub fn read_overflows(at: usize, register: Register, site: usize) -> Option<Vec<u32>> {
    const SAVED: [Register; 4] = [Register::A0, Register::A1, Register::A6, Register::A7];
    const FRAME: i32 = 32;
    let slots = || SAVED.into_iter().zip((0..).step_by(8));
    // The value replaces what was saved of its register.
    let value = slots().find(|(saved, _)| *saved == register).map_or_else(
        || addi(register, Register::A1, 0),
        |(_, offset)| sd(Register::A1, offset, Register::SP),
    );
    let mut code = vec![addi(Register::SP, Register::SP, -FRAME)];
    code.extend(slots().map(|(saved, offset)| sd(saved, offset, Register::SP)));
    code.extend(call(READ_OVERFLOWS));
    code.push(value);
    code.extend(slots().map(|(saved, offset)| ld(saved, offset, Register::SP)));
    code.push(addi(Register::SP, Register::SP, FRAME));
    code.push(jump(at + code.len() * 4, site + 4)?);
    debug_assert_eq!(code.len() * 4, READ_OVERFLOWS_LEN);
    Some(code)
}
