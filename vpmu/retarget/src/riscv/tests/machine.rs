//! An emulator of the instructions that the new code consists of.

use std::collections::BTreeMap;

/// Maximum number of instructions of a run.
const MAX: usize = 2000;

/// A processor, and the SBI calls that it has made.
pub struct Machine<'a> {
    image: &'a [u8],
    /// Address of the image.
    pub base: u64,
    pub registers: [u64; 32],
    pub memory: BTreeMap<u64, u64>,
    /// Value that SBI calls return.
    pub answer: u64,
    /// Extension, function and first argument of each SBI call.
    pub calls: Vec<[u64; 3]>,
    /// CSRs, by their numbers.
    pub csrs: BTreeMap<u32, u64>,
}

/// What surrounds the processor.
pub trait Outside {
    /// Loads 8 bytes, if the address is not in [`Machine::memory`].
    fn load(&mut self, address: u64) -> u64 {
        panic!("only what was saved is loaded, not {address:#x}");
    }

    /// Stores 8 bytes. Returns false if they go to [`Machine::memory`].
    fn store(&mut self, _address: u64, _value: u64) -> bool {
        false
    }

    /// Makes an SBI call. Returns false if it only has to be noted in [`Machine::calls`].
    fn call(&mut self, _registers: &mut [u64; 32]) -> bool {
        false
    }
}

/// Nothing surrounds it.
pub struct Nothing;

impl Outside for Nothing {}

impl<'a> Machine<'a> {
    /// Creates a processor with an image at an address, and a different value in each register.
    pub fn new(image: &'a [u8], base: u64) -> Self {
        let mut registers = [0; 32];
        for (value, register) in (0x1111_0000_0000_0002..).step_by(2).zip(&mut registers[1..]) {
            *register = value;
        }
        registers[2] = 0xffff_ffc6_0000_0fc0;
        let (memory, csrs) = (BTreeMap::new(), BTreeMap::new());
        Self { image, base, registers, memory, answer: 0, calls: Vec::new(), csrs }
    }

    /// Runs from one offset to another, or to the return address.
    pub fn run(&mut self, from: usize, to: Option<usize>) {
        self.run_in(&mut Nothing, from, to);
    }

    /// Does the same with something around the processor.
    pub fn run_in(&mut self, outside: &mut impl Outside, from: usize, to: Option<usize>) {
        let end = to.map_or(self.registers[1], |to| self.base.wrapping_add(to as u64));
        let mut pc = self.base.wrapping_add(from as u64);
        for _ in 0..MAX {
            if pc == end {
                return;
            }
            pc = self.step(outside, pc);
        }
        panic!("the code does not end");
    }

    fn step(&mut self, outside: &mut impl Outside, pc: u64) -> u64 {
        let at = usize::try_from(pc.wrapping_sub(self.base)).unwrap();
        let parcel = |at: usize| u32::from(u16::from_le_bytes([self.image[at], self.image[at + 1]]));
        let low = parcel(at);
        let bit = |word: u32, from: u32, to: u32| u64::from(word >> from & 1) << to;
        if low & 3 != 3 {
            assert_eq!(low & 0xe003, 0xa001, "only C.J is used, {low:#x} is not");
            // imm[11|4|9:8|10|6|7|3:1|5]
            let places = [11, 4, 9, 8, 10, 6, 7, 3, 2, 1, 5];
            let distance: u64 = (2..13).rev().zip(places).map(|(from, to)| bit(low, from, to)).sum();
            return pc.wrapping_add(extend(distance, 12));
        }
        let word = low | parcel(at + 2) << 16;
        let field = |at: u32| (word >> at & 0x1f) as usize;
        let (rd, rs1, rs2) = (field(7), field(15), field(20));
        let immediate = extend(u64::from(word >> 20), 12);
        let store_to = extend(u64::from(word >> 25 << 5 | word >> 7 & 0x1f), 12);
        let (left, right) = (self.registers[rs1], self.registers[rs2]);
        let shift = word >> 20 & 0x3f;
        let (result, next) = match (word & 0x7f, word >> 12 & 7) {
            (0x37, _) => (extend(u64::from(word & !0xfff), 32), pc + 4),
            (0x17, _) => (pc.wrapping_add(extend(u64::from(word & !0xfff), 32)), pc + 4),
            (0x13, 0) => (left.wrapping_add(immediate), pc + 4),
            (0x13, 1) => (left << shift, pc + 4),
            (0x13, 5) if word >> 26 == 0 => (left >> shift, pc + 4),
            (0x13, 4) => (left ^ immediate, pc + 4),
            (0x13, 7) => (left & immediate, pc + 4),
            (0x1b, 0) => (extend(left.wrapping_add(immediate) & 0xffff_ffff, 32), pc + 4),
            (0x33, funct3) => match (funct3, word >> 25) {
                (0, 0) => (left.wrapping_add(right), pc + 4),
                (0, 0x20) => (left.wrapping_sub(right), pc + 4),
                (1, 0) => (left << (right & 63), pc + 4),
                (3, 0) => (u64::from(left < right), pc + 4),
                (4, 0) => (left ^ right, pc + 4),
                (5, 0) => (left >> (right & 63), pc + 4),
                (6, 0) => (left | right, pc + 4),
                (7, 0) => (left & right, pc + 4),
                _ => panic!("{word:#x} is not used"),
            },
            (0x03, width @ (2 | 3)) => {
                let address = left.wrapping_add(immediate);
                let loaded = match self.memory.get(&address) {
                    Some(saved) => *saved,
                    None => outside.load(address),
                };
                (if width == 2 { extend(loaded & 0xffff_ffff, 32) } else { loaded }, pc + 4)
            }
            (0x23, 3) => {
                let address = left.wrapping_add(store_to);
                if !outside.store(address, right) {
                    assert!(
                        address >= self.registers[2],
                        "an interrupt would overwrite what is below the stack pointer"
                    );
                    self.memory.insert(address, right);
                }
                return pc + 4;
            }
            (0x63, condition) => {
                let jumps = match condition {
                    0 => left == right,
                    1 => left != right,
                    6 => left < right,
                    7 => left >= right,
                    _ => panic!("{word:#x} is not used"),
                };
                // imm[12|10:5], imm[4:1|11]
                let low: u64 = (1..5).map(|to| bit(word, to + 7, to)).sum();
                let high: u64 = (5..11).map(|to| bit(word, to + 20, to)).sum();
                let distance = low | high | bit(word, 7, 11) | bit(word, 31, 12);
                return if jumps { pc.wrapping_add(extend(distance, 13)) } else { pc + 4 };
            }
            (0x6f, _) => {
                // imm[20|10:1|11|19:12]
                let low: u64 = (1..11).map(|to| bit(word, to + 20, to)).sum();
                let high: u64 = (12..20).map(|to| bit(word, to, to)).sum();
                let distance = low | high | bit(word, 20, 11) | bit(word, 31, 20);
                (pc + 4, pc.wrapping_add(extend(distance, 21)))
            }
            (0x67, 0) => (pc + 4, left.wrapping_add(immediate) & !1),
            (0x73, 0) if word == 0x73 => {
                if outside.call(&mut self.registers) {
                    return pc + 4;
                }
                self.calls.push([17, 16, 10].map(|register: usize| self.registers[register]));
                // The error, which the code ignores, and the value.
                self.registers[10] = 0xdead;
                self.registers[11] = self.answer;
                return pc + 4;
            }
            (0x73, kind @ (2 | 5 | 7)) => {
                let csr = self.csrs.entry(word >> 20).or_default();
                let before = *csr;
                *csr = match kind {
                    2 => before | left,
                    5 => rs1 as u64,
                    _ => before & !(rs1 as u64),
                };
                (before, pc + 4)
            }
            _ => panic!("{word:#x} is not used"),
        };
        self.registers[rd] = if rd == 0 { 0 } else { result };
        next
    }
}

fn extend(value: u64, width: u32) -> u64 {
    let unused = u64::BITS - width;
    ((value << unused).cast_signed() >> unused).cast_unsigned()
}
