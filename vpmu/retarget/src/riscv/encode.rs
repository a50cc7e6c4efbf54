//! Encodes instructions (RISC-V ISA manual, volume I, "RV32/64G Instruction Set Listings").

use super::distance::{JUMP, SHORT_JUMP};
use super::register::Register;

/// Encodes LUI, which loads the upper 20 bits.
pub fn lui(rd: Register, high: u32) -> u32 {
    0x37 | rd.number() << 7 | high << 12
}

/// Encodes ADDI.
pub fn addi(rd: Register, rs1: Register, immediate: i32) -> u32 {
    0x13 | rd.number() << 7 | rs1.number() << 15 | immediate.cast_unsigned() << 20
}

/// Encodes ADD.
pub fn add(rd: Register, rs1: Register, rs2: Register) -> u32 {
    0x33 | rd.number() << 7 | rs1.number() << 15 | rs2.number() << 20
}

/// Encodes LD.
pub fn ld(rd: Register, offset: u32, base: Register) -> u32 {
    0x3003 | rd.number() << 7 | base.number() << 15 | offset << 20
}

/// Encodes SD.
pub fn sd(rs2: Register, offset: u32, base: Register) -> u32 {
    0x3023 | base.number() << 15 | rs2.number() << 20 | (offset & 0x1f) << 7 | offset >> 5 << 25
}

/// RET, in four bytes.
pub const RET: u32 = 0x0000_8067;
/// RET, in two bytes (`C.JR ra`).
pub const SHORT_RET: u16 = 0x8082;

/// Encodes J from one offset to another. Returns `None` if it does not reach.
pub fn jump(from: usize, to: usize) -> Option<u32> {
    Some(0x6f | JUMP.scatter(distance(from, to)?)?)
}

/// Encodes C.J from one offset to another. Returns `None` if it does not reach.
pub fn short_jump(from: usize, to: usize) -> Option<u16> {
    u16::try_from(0xa001 | SHORT_JUMP.scatter(distance(from, to)?)?).ok()
}

fn distance(from: usize, to: usize) -> Option<i64> {
    i64::try_from(to).ok()?.checked_sub(i64::try_from(from).ok()?)
}
