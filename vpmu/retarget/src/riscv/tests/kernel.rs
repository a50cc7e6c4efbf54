//! Builds small kernels.

use crate::riscv::encode::{RET, SHORT_RET, addi, lui};
use crate::riscv::image::{HEADER, MAGIC};
use crate::riscv::register::Register;

/// Instructions that have nothing to do with the PMU and do not branch: some of two bytes, and some of four with
/// various second halves.
pub const OTHERS: [&[u8]; 9] = [
    // ADDI a0, a0, 1; MV a0, a1; LI a4, 0; XOR a5, a5, a4; ADD a5, a5, a0.
    &[0x05, 0x05],
    &[0x2e, 0x85],
    &[0x01, 0x47],
    &[0xb9, 0x8f],
    &[0xaa, 0x97],
    // LD a5, 0(a0); LD a4, -56(s0); SB a5, 40(s1); ANDI a5, a5, 255.
    &[0x83, 0x37, 0x05, 0x00],
    &[0x03, 0x37, 0x84, 0xfc],
    &[0x23, 0x84, 0xf4, 0x02],
    &[0x93, 0xf7, 0xf7, 0x0f],
];

/// A kernel that is being built.
#[derive(Clone)]
pub struct KernelBuilder {
    pub image: Vec<u8>,
    /// Indices of [`OTHERS`] in the order in which they are added, again and again.
    others: Vec<usize>,
    /// Number of others added so far.
    next: usize,
}

impl KernelBuilder {
    /// Begins a kernel with its header.
    pub fn new(others: &[usize]) -> Self {
        let (at, magic) = MAGIC;
        let mut image = vec![0; HEADER];
        image[at..at + magic.len()].copy_from_slice(magic);
        Self { image, others: others.to_vec(), next: 0 }
    }

    /// Builds a kernel with all kinds of sites.
    pub fn whole(others: &[usize]) -> (Self, Sites) {
        let mut kernel = Self::new(others);
        let first_id = kernel.others(300).id(Register::A7, 1);
        let switch = kernel.others(300).short(SHORT_RET).switch(&CSRS, true);
        let overflow = kernel.others(300).read_overflows(13);
        let second_id = kernel.others(300).id(Register::A0, 0);
        kernel.others(100).short(SHORT_RET);
        (kernel, Sites { ids: [first_id, second_id], switch, overflow })
    }

    pub fn here(&self) -> usize {
        self.image.len()
    }

    pub fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.image.extend(bytes);
        self
    }

    pub fn word(&mut self, word: u32) -> &mut Self {
        self.bytes(&word.to_le_bytes())
    }

    pub fn short(&mut self, parcel: u16) -> &mut Self {
        self.bytes(&parcel.to_le_bytes())
    }

    /// Adds at least `len` bytes of [`OTHERS`].
    pub fn others(&mut self, len: usize) -> &mut Self {
        let end = self.here() + len;
        while self.here() < end {
            let other = OTHERS[self.others[self.next % self.others.len()]];
            self.next += 1;
            self.bytes(other);
        }
        self
    }

    /// Adds a load of the SBI PMU extension's id, with at least `between` bytes of others between its instructions.
    pub fn id(&mut self, register: Register, between: usize) -> usize {
        let at = self.here();
        self.word(lui(register, 0x505)).others(between).word(addi(register, register, -683));
        at
    }

    /// Adds a switch over these CSRs, with returns of two bytes or of four.
    pub fn switch(&mut self, csrs: &[u16], short: bool) -> usize {
        let at = self.here();
        for csr in csrs {
            self.word(0x2573 | u32::from(*csr) << 20);
            if short {
                self.short(SHORT_RET)
            } else {
                self.word(RET)
            };
        }
        at
    }

    pub fn read_overflows(&mut self, register: u32) -> usize {
        let at = self.here();
        self.word(0xda00_2073 | register << 7);
        at
    }
}

/// Offsets of the sites in a kernel.
pub struct Sites {
    pub ids: [usize; 2],
    pub switch: usize,
    pub overflow: usize,
}

/// The CSRs that a switch reads, in the order that a compiler chose: the upper halves in descending order, then the
/// lower ones in descending order with the last two exchanged.
pub const CSRS: [u16; 64] = {
    let mut csrs = [0; 64];
    let mut at = 0;
    while at < 32 {
        csrs[at as usize] = 0xc9f - at;
        csrs[32 + at as usize] = 0xc1f - at;
        at += 1;
    }
    csrs[62] = 0xc00;
    csrs[63] = 0xc01;
    csrs
};

/// Adds a PE header that says which part of the image is executable.
pub fn mark_as_text(image: &mut [u8], start: usize, end: usize) {
    // The header takes the place of the first instructions.
    let header = HEADER;
    image[header..header + 24 + 40].fill(0);
    image[0x3c..0x40].copy_from_slice(&u32::try_from(header).unwrap().to_le_bytes());
    image[header..header + 4].copy_from_slice(b"PE\0\0");
    image[header + 6] = 1;
    let section = &mut image[header + 24..];
    section[16..20].copy_from_slice(&u32::try_from(end - start).unwrap().to_le_bytes());
    section[20..24].copy_from_slice(&u32::try_from(start).unwrap().to_le_bytes());
    section[39] = 0x60;
}
