//! An emulator of the instructions that the new code consists of.

use std::collections::BTreeMap;

/// A processor, and the SBI calls that it has made.
pub struct Machine<'a> {
    image: &'a [u8],
    /// Address of the image.
    base: u64,
    pub registers: [u64; 32],
    pub memory: BTreeMap<u64, u64>,
    /// Value that SBI calls return.
    pub answer: u64,
    /// Extension, function and first argument of each SBI call.
    pub calls: Vec<[u64; 3]>,
}

impl<'a> Machine<'a> {
    /// Creates a processor with an image at an address, and a different value in each register.
    pub fn new(image: &'a [u8], base: u64) -> Self {
        let mut registers = [0; 32];
        for (value, register) in (0x1111_0000_0000_0002..).step_by(2).zip(&mut registers[1..]) {
            *register = value;
        }
        registers[2] = 0xffff_ffc6_0000_0fc0;
        Self { image, base, registers, memory: BTreeMap::new(), answer: 0, calls: Vec::new() }
    }

    /// Runs from one offset to another, or to the return address.
    pub fn run(&mut self, from: usize, to: Option<usize>) {
        let end = to.map_or(self.registers[1], |to| self.base.wrapping_add(to as u64));
        let mut pc = self.base.wrapping_add(from as u64);
        for _ in 0..100 {
            if pc == end {
                return;
            }
            pc = self.step(pc);
        }
        panic!("the code does not end");
    }

    fn step(&mut self, pc: u64) -> u64 {
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
        let value = |register: usize| self.registers[register];
        let (result, next) = match (word & 0x7f, word >> 12 & 7) {
            (0x37, _) => (extend(u64::from(word & !0xfff), 32), pc + 4),
            (0x13, 0) => (value(rs1).wrapping_add(immediate), pc + 4),
            (0x33, 0) if word >> 25 == 0 => (value(rs1).wrapping_add(value(rs2)), pc + 4),
            (0x03, 3) => {
                let address = value(rs1).wrapping_add(immediate);
                (*self.memory.get(&address).expect("only what was saved is loaded"), pc + 4)
            }
            (0x23, 3) => {
                let address = value(rs1).wrapping_add(store_to);
                assert!(address >= value(2), "an interrupt would overwrite what is below the stack pointer");
                self.memory.insert(address, value(rs2));
                return pc + 4;
            }
            (0x6f, _) => {
                // imm[20|10:1|11|19:12]
                let low: u64 = (1..11).map(|to| bit(word, to + 20, to)).sum();
                let high: u64 = (12..20).map(|to| bit(word, to, to)).sum();
                let distance = low | high | bit(word, 20, 11) | bit(word, 31, 20);
                (pc + 4, pc.wrapping_add(extend(distance, 21)))
            }
            (0x67, 0) => (pc + 4, value(rs1).wrapping_add(immediate) & !1),
            (0x73, 0) if word == 0x73 => {
                self.calls.push([value(17), value(16), value(10)]);
                // The error, which the code ignores, and the value.
                self.registers[10] = 0xdead;
                self.registers[11] = self.answer;
                return pc + 4;
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
