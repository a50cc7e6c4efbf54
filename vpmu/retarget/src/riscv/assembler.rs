//! Assembles code with branches to labels. The code may be at any address: it refers to other places in the kernel by
//! their distances.

use super::distance::BRANCH;
use super::encode::{addi, jump, lui};
use super::register::Register;

/// Code that is being assembled for an offset in the image.
#[derive(Debug)]
pub struct Assembler {
    at: usize,
    words: Vec<u32>,
    /// Index of the instruction that each label is at, once that is known.
    labels: Vec<Option<usize>>,
    /// Index and label of each branch and jump.
    branches: Vec<(usize, Label)>,
    is_out_of_reach: bool,
}

/// An instruction to which the code branches.
#[derive(Debug, Clone, Copy)]
pub struct Label(usize);

/// A control and status register (RISC-V ISA manual, volume II, "CSR Listing").
#[derive(Debug, Clone, Copy)]
pub enum Csr {
    Sstatus = 0x100,
    Scause = 0x142,
}

/// Condition of a branch, by `funct3`.
#[derive(Debug, Clone, Copy)]
pub enum If {
    Equal = 0,
    NotEqual = 1,
    /// Of unsigned numbers.
    Less = 6,
    /// Of unsigned numbers.
    NotLess = 7,
}

impl Assembler {
    /// Begins code for the offset `at`.
    pub fn new(at: usize) -> Self {
        Self { at, words: Vec::new(), labels: Vec::new(), branches: Vec::new(), is_out_of_reach: false }
    }

    /// Returns the code, or `None` if a place is out of reach.
    ///
    /// # Panics
    /// If a label is not set.
    pub fn finish(mut self) -> Option<Vec<u32>> {
        for (index, Label(label)) in std::mem::take(&mut self.branches) {
            let target = self.labels[label].expect("every label is set");
            if self.words[index] == 0 {
                self.words[index] = jump(index * 4, target * 4)?;
            } else {
                let distance = i64::try_from(target).ok()? - i64::try_from(index).ok()?;
                self.words[index] |= BRANCH.scatter(distance * 4)?;
            }
        }
        (!self.is_out_of_reach).then_some(self.words)
    }

    /// Returns the offset in the image of the next instruction.
    pub fn here(&self) -> usize {
        self.at + self.words.len() * 4
    }

    pub fn label(&mut self) -> Label {
        self.labels.push(None);
        Label(self.labels.len() - 1)
    }

    pub fn labels<const N: usize>(&mut self) -> [Label; N] {
        std::array::from_fn(|_| self.label())
    }

    pub fn set(&mut self, Label(label): Label) {
        self.labels[label] = Some(self.words.len());
    }

    pub fn word(&mut self, word: u32) {
        self.words.push(word);
    }

    pub fn branch(&mut self, condition: If, left: Register, right: Register, to: Label) {
        self.branches.push((self.words.len(), to));
        self.word(0x63 | (condition as u32) << 12 | left.number() << 15 | right.number() << 20);
    }

    pub fn branch_if_zero(&mut self, register: Register, to: Label) {
        self.branch(If::Equal, register, Register::ZERO, to);
    }

    pub fn branch_unless_zero(&mut self, register: Register, to: Label) {
        self.branch(If::NotEqual, register, Register::ZERO, to);
    }

    pub fn jump(&mut self, to: Label) {
        self.branches.push((self.words.len(), to));
        self.word(0);
    }

    /// Loads the address of an offset in the image.
    pub fn address(&mut self, rd: Register, of: usize) {
        let low = self.upper(rd, of);
        self.word(addi(rd, rd, low));
    }

    /// Jumps to an offset in the image, and sets `link` to the address after the jump. Clobbers `by`.
    pub fn far_jump(&mut self, by: Register, link: Register, to: usize) {
        let low = self.upper(by, to);
        self.word(0x67 | link.number() << 7 | by.number() << 15 | low.cast_unsigned() << 20);
    }

    /// Adds AUIPC. Returns the lower part of the distance, for the instruction after it.
    fn upper(&mut self, rd: Register, of: usize) -> i32 {
        let Some((high, low)) = split(self.here(), of) else {
            self.is_out_of_reach = true;
            return 0;
        };
        self.word(0x17 | rd.number() << 7 | high << 12);
        low
    }

    /// Loads a number of 32 bits, which is extended by its sign.
    pub fn load_immediate(&mut self, rd: Register, number: i32) {
        let low = number << 20 >> 20;
        let high = number.wrapping_sub(low).cast_unsigned() >> 12;
        if high == 0 {
            return self.word(addi(rd, Register::ZERO, low));
        }
        self.word(lui(rd, high));
        // ADDIW.
        self.word(addi(rd, rd, low) | 0x8);
    }

    fn register(&mut self, opcode: u32, [rd, rs1, rs2]: [Register; 3]) {
        self.word(opcode | rd.number() << 7 | rs1.number() << 15 | rs2.number() << 20);
    }

    pub fn add(&mut self, rd: Register, rs1: Register, rs2: Register) {
        self.register(0x33, [rd, rs1, rs2]);
    }

    pub fn sub(&mut self, rd: Register, rs1: Register, rs2: Register) {
        self.register(0x4000_0033, [rd, rs1, rs2]);
    }

    pub fn and(&mut self, rd: Register, rs1: Register, rs2: Register) {
        self.register(0x7033, [rd, rs1, rs2]);
    }

    pub fn or(&mut self, rd: Register, rs1: Register, rs2: Register) {
        self.register(0x6033, [rd, rs1, rs2]);
    }

    pub fn xor(&mut self, rd: Register, rs1: Register, rs2: Register) {
        self.register(0x4033, [rd, rs1, rs2]);
    }

    /// Shifts to the left.
    pub fn sll(&mut self, rd: Register, rs1: Register, rs2: Register) {
        self.register(0x1033, [rd, rs1, rs2]);
    }

    /// Shifts to the right.
    pub fn srl(&mut self, rd: Register, rs1: Register, rs2: Register) {
        self.register(0x5033, [rd, rs1, rs2]);
    }

    /// Sets `rd` to 1 if a register is not 0, or else to 0.
    pub fn snez(&mut self, rd: Register, register: Register) {
        self.register(0x3033, [rd, Register::ZERO, register]);
    }

    pub fn slli(&mut self, rd: Register, rs1: Register, bits: u32) {
        self.word(0x1013 | rd.number() << 7 | rs1.number() << 15 | bits << 20);
    }

    pub fn srli(&mut self, rd: Register, rs1: Register, bits: u32) {
        self.word(0x5013 | rd.number() << 7 | rs1.number() << 15 | bits << 20);
    }

    pub fn andi(&mut self, rd: Register, rs1: Register, immediate: i32) {
        self.word(addi(rd, rs1, immediate) | 0x7000);
    }

    pub fn not(&mut self, rd: Register, rs1: Register) {
        self.word(addi(rd, rs1, -1) | 0x4000);
    }

    /// Loads 32 bits, which are extended by their sign.
    pub fn lw(&mut self, rd: Register, offset: i32, base: Register) {
        self.word(0x2003 | rd.number() << 7 | base.number() << 15 | offset.cast_unsigned() << 20);
    }

    /// Reads a CSR and writes a number below 32 to it, in one instruction.
    pub fn exchange_csr(&mut self, rd: Register, csr: Csr, number: u32) {
        self.word(0x5073 | rd.number() << 7 | number << 15 | (csr as u32) << 20);
    }

    /// Sets the bits of a register in a CSR.
    pub fn set_in_csr(&mut self, csr: Csr, bits: Register) {
        self.word(0x2073 | bits.number() << 15 | (csr as u32) << 20);
    }

    /// Reads a CSR and clears these bits below 32 in it, in one instruction.
    pub fn clear_in_csr(&mut self, rd: Register, csr: Csr, bits: u32) {
        self.word(0x7073 | rd.number() << 7 | bits << 15 | (csr as u32) << 20);
    }
}

/// Splits the distance between two offsets for AUIPC and the instruction after it. Returns `None` if it is too large.
pub fn split(from: usize, to: usize) -> Option<(u32, i32)> {
    let distance = i64::try_from(to).ok()?.checked_sub(i64::try_from(from).ok()?)?;
    let distance = i32::try_from(distance).ok()?;
    let low = distance << 20 >> 20;
    let high = distance.checked_sub(low)?.cast_unsigned() >> 12;
    Some((high, low))
}
