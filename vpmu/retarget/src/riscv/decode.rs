//! Decoding of RISC-V instructions: their lengths, which registers they read and write, and where the processor goes
//! after them.
//!
//! The decoder knows the instructions that a kernel's code consists of: RV64GC, bit manipulation, conditional zero,
//! hypervisor, and the formats of vector instructions. Everything else is treated as no instruction: reserved
//! encodings, unusual hints, floating-point arithmetic, custom opcodes. The stricter the decoder is, the sooner data is
//! recognized as data.

use super::distance::{BRANCH, JUMP, SHORT_BRANCH, SHORT_JUMP};
use super::image::Text;
use super::register::{Register, Registers};

/// An instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Instruction {
    /// Its length in bytes.
    pub len: usize,
    /// The registers that it reads.
    pub reads: Registers,
    /// The register that it writes; x0 if it writes none.
    pub writes: Register,
    /// Where the processor goes after it.
    pub flow: Flow,
}

/// Where the processor goes after an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// To the next instruction.
    Next,
    /// To the next instruction, or by this offset: a conditional branch, or a direct call.
    MayJump(i32),
    /// By this offset: a direct jump.
    Jumps(i32),
    /// To an unknown address: a return, or an indirect jump.
    Leaves,
    /// To the next instruction, but other code runs before, or registers change that are not in
    /// [`Instruction::writes`].
    Unclear,
}

impl Flow {
    /// Returns the offset of a direct branch, jump or call.
    pub fn distance(self) -> Option<i32> {
        match self {
            Self::MayJump(distance) | Self::Jumps(distance) => Some(distance),
            Self::Next | Self::Leaves | Self::Unclear => None,
        }
    }

    /// Returns whether the bytes after the instruction need not be an instruction.
    pub fn ends(self) -> bool {
        matches!(self, Self::Jumps(_) | Self::Leaves)
    }
}

/// Decodes the instruction at an offset. Returns `None` if the bytes are no instruction.
pub fn decode(text: &Text, at: usize) -> Option<Instruction> {
    let parcel = text.parcel(at)?;
    if parcel & 3 == 3 { full(text.word(at)?) } else { compressed(parcel.into()) }
}

/// Decodes a 32-bit instruction.
fn full(word: u32) -> Option<Instruction> {
    let [rd, rs1, rs2] = [7, 15, 20].map(|at| Register::field(word, at));
    let funct3 = word >> 12 & 7;
    let funct7 = word >> 25;
    let both = rs1 | rs2;
    let (reads, writes, flow) = match word & 0x7f {
        0x03 if funct3 != 7 => (rs1.into(), rd, Flow::Next),
        0x07 | 0x27 if matches!(funct3, 2 | 3) => (rs1.into(), Register::ZERO, Flow::Next),
        0x07 | 0x27 if matches!(funct3, 0 | 5..=7) => (both, Register::ZERO, Flow::Unclear),
        0x57 => (both, Register::ZERO, Flow::Unclear),
        0x0f if funct3 <= 2 => (rs1.into(), Register::ZERO, Flow::Next),
        0x13 if is_immediate(funct3, word >> 26) => (rs1.into(), rd, Flow::Next),
        0x1b if is_short_immediate(funct3, funct7) => (rs1.into(), rd, Flow::Next),
        0x17 | 0x37 => (Registers::NONE, rd, Flow::Next),
        0x23 if funct3 <= 3 => (both, Register::ZERO, Flow::Next),
        0x2f if funct3 <= 3 && is_atomic(word >> 27) => (both, rd, Flow::Next),
        0x33 if is_arithmetic(funct3, funct7) => (both, rd, Flow::Next),
        0x3b if is_short_arithmetic(funct3, funct7) => (both, rd, Flow::Next),
        0x63 if !matches!(funct3, 2 | 3) => (both, Register::ZERO, Flow::MayJump(BRANCH.gather(word))),
        0x67 if funct3 == 0 && rd == Register::ZERO => (rs1.into(), rd, Flow::Leaves),
        0x67 if funct3 == 0 => (rs1.into(), rd, Flow::Unclear),
        0x6f if rd == Register::ZERO => (Registers::NONE, rd, Flow::Jumps(JUMP.gather(word))),
        0x6f => (Registers::NONE, rd, Flow::MayJump(JUMP.gather(word))),
        0x73 => match funct3 {
            0 => (both, Register::ZERO, privileged(word)?),
            1..=3 => (rs1.into(), rd, Flow::Next),
            4 if matches!(funct7, 0x30..=0x37) => (both, rd, Flow::Next),
            5..=7 => (Registers::NONE, rd, Flow::Next),
            _ => return None,
        },
        _ => return None,
    };
    Some(Instruction { len: 4, reads, writes, flow })
}

/// Decodes ECALL and the other instructions of the SYSTEM opcode with `funct3` 0.
fn privileged(word: u32) -> Option<Flow> {
    match word {
        // ECALL, EBREAK.
        0x0000_0073 | 0x0010_0073 => Some(Flow::Unclear),
        // SRET.
        0x1020_0073 => Some(Flow::Leaves),
        // WFI, WRS.NTO, WRS.STO.
        0x1050_0073 | 0x00d0_0073 | 0x01d0_0073 => Some(Flow::Next),
        // SFENCE.VMA, SINVAL.VMA and its fences, HFENCE, HINVAL.
        _ if Register::field(word, 7) == Register::ZERO => {
            matches!(word >> 25, 0x09 | 0x0b | 0x0c | 0x11 | 0x13 | 0x31 | 0x33).then_some(Flow::Next)
        }
        _ => None,
    }
}

fn is_immediate(funct3: u32, funct6: u32) -> bool {
    match funct3 {
        1 => matches!(funct6, 0 | 0x0a | 0x12 | 0x18 | 0x1a),
        5 => matches!(funct6, 0 | 0x0a | 0x10 | 0x12 | 0x18 | 0x1a),
        _ => true,
    }
}

fn is_short_immediate(funct3: u32, funct7: u32) -> bool {
    match funct3 {
        0 => true,
        1 => matches!(funct7, 0 | 0x04 | 0x05 | 0x30),
        5 => matches!(funct7, 0 | 0x20 | 0x30),
        _ => false,
    }
}

fn is_arithmetic(funct3: u32, funct7: u32) -> bool {
    match funct7 {
        0x00 | 0x01 => true,
        0x20 => !matches!(funct3, 1..=3),
        0x04 => matches!(funct3, 4 | 7),
        0x05 => funct3 != 0,
        0x07 => matches!(funct3, 5 | 7),
        0x10 => matches!(funct3, 2 | 4 | 6),
        0x24 | 0x30 => matches!(funct3, 1 | 5),
        0x14 | 0x34 => funct3 == 1,
        _ => false,
    }
}

fn is_short_arithmetic(funct3: u32, funct7: u32) -> bool {
    match funct7 {
        0x00 => matches!(funct3, 0 | 1 | 5),
        0x01 => !matches!(funct3, 1..=3),
        0x04 => matches!(funct3, 0 | 4),
        0x10 => matches!(funct3, 2 | 4 | 6),
        0x20 => matches!(funct3, 0 | 5),
        0x30 => matches!(funct3, 1 | 5),
        _ => false,
    }
}

fn is_atomic(funct5: u32) -> bool {
    matches!(funct5, 0..=5 | 8 | 12 | 16 | 20 | 24 | 28)
}

/// Decodes a 16-bit instruction by its two lowest and three highest bits.
fn compressed(parcel: u32) -> Option<Instruction> {
    let rd = Register::field(parcel, 7);
    let rs2 = Register::field(parcel, 2);
    let [short_high, short_low] = [7, 2].map(|at| Register::short_field(parcel, at));
    let immediate = parcel >> 2 & 0x1f | parcel >> 7 & 0x20;
    let stack: Registers = Register::SP.into();
    let (reads, writes, flow) = match (parcel & 3, parcel >> 13) {
        (0, 0) if parcel >> 5 != 0 => (stack, short_low, Flow::Next),
        (0, 2 | 3) => (short_high.into(), short_low, Flow::Next),
        (0, 1 | 5) => (short_high.into(), Register::ZERO, Flow::Next),
        (0, 6 | 7) => (short_high | short_low, Register::ZERO, Flow::Next),
        // C.NOP must have a zero immediate.
        (1, 0) if rd != Register::ZERO || immediate == 0 => (rd.into(), rd, Flow::Next),
        (1, 1) if rd != Register::ZERO => (rd.into(), rd, Flow::Next),
        (1, 2) if rd != Register::ZERO => (Registers::NONE, rd, Flow::Next),
        (1, 3) if rd == Register::SP && immediate != 0 => (stack, rd, Flow::Next),
        (1, 3) if rd != Register::ZERO && immediate != 0 => (Registers::NONE, rd, Flow::Next),
        (1, 4) => match (parcel >> 10 & 3, parcel >> 12 & 1, parcel >> 5 & 3) {
            (0 | 1, _, _) if immediate == 0 => return None,
            (0..=2, _, _) => (short_high.into(), short_high, Flow::Next),
            (_, 1, 2 | 3) => return None,
            _ => (short_high | short_low, short_high, Flow::Next),
        },
        (1, 5) => (Registers::NONE, Register::ZERO, Flow::Jumps(SHORT_JUMP.gather(parcel))),
        (1, 6 | 7) => (short_high.into(), Register::ZERO, Flow::MayJump(SHORT_BRANCH.gather(parcel))),
        (2, 0) if rd != Register::ZERO && immediate != 0 => (rd.into(), rd, Flow::Next),
        (2, 1 | 5) => (stack, Register::ZERO, Flow::Next),
        (2, 2 | 3) if rd != Register::ZERO => (stack, rd, Flow::Next),
        (2, 4) => match (parcel >> 12 & 1, rd, rs2) {
            (0, Register::ZERO, _) => return None,
            (0, _, Register::ZERO) => (rd.into(), Register::ZERO, Flow::Leaves),
            (0, _, _) => (rs2.into(), rd, Flow::Next),
            // C.EBREAK, or C.JALR.
            (_, _, Register::ZERO) => (rd.into(), Register::ZERO, Flow::Unclear),
            (_, Register::ZERO, _) => return None,
            _ => (rd | rs2, rd, Flow::Next),
        },
        (2, 6 | 7) => (stack | rs2, Register::ZERO, Flow::Next),
        _ => return None,
    };
    Some(Instruction { len: 2, reads, writes, flow })
}
