//! The RISC-V host's proof: one program, whose every instruction is known.
//!
//! Counts are exact, whatever is counted. Samples are taken of cycles, which are instructions here: this processor's overflows of
//! the counter of instructions get lost now and then, as the lab's README says.

use guest_images::{Arch, Progress};

use super::{Check, Plan, numbers};
use crate::{Result, Scenario, default_host};

/// How often the program loops: what one `lui` can load.
const ROUNDS: u64 = 2441 << 12;
/// The first, two a round, and two at the end.
const INSTRUCTIONS: u64 = 1 + 2 * ROUNDS + 2;
const PERIOD: u64 = 20_000;
/// Where the program's text begins in memory.
const START: u64 = 0x10000 + HEADERS as u64;
/// An even number of instructions after its beginning the program is about to branch.
const BRANCH: u64 = START + 8;

const TEXT: [u32; 5] = [
    0x0098_9537, // lui a0, 2441
    0xfff5_0513, // addi a0, a0, -1
    0xfe05_1ee3, // bnez a0, -4
    0x05d0_0893, // li a7, 93: the system call that ends a program
    0x0000_0073, // ecall
];

/// The size of an ELF file's header and that of its one segment.
const HEADERS: usize = 64 + 56;

/// The program as Linux loads it (System V ABI, chapters 4 and 5).
fn program() -> Vec<u8> {
    const ELF_64_LITTLE: [u8; 8] = [0x7f, b'E', b'L', b'F', 2, 1, 1, 0];
    const EXECUTABLE: u16 = 2;
    const RISCV: u16 = 243;
    const LOADED: u32 = 1;
    const READABLE_AND_EXECUTABLE: u32 = 5;
    let size = (HEADERS + size_of_val(&TEXT)) as u64;
    let base = START - HEADERS as u64;
    let mut file = ELF_64_LITTLE.to_vec();
    file.extend([0; 8]);
    let mut half = |number: u16| file.extend(number.to_le_bytes());
    half(EXECUTABLE);
    half(RISCV);
    file.extend(1_u32.to_le_bytes());
    for number in [START, 64, 0] {
        file.extend(number.to_le_bytes());
    }
    file.extend(0_u32.to_le_bytes());
    for number in [64_u16, 56, 1, 0, 0, 0] {
        file.extend(number.to_le_bytes());
    }
    for number in [LOADED, READABLE_AND_EXECUTABLE] {
        file.extend(number.to_le_bytes());
    }
    for number in [0, base, base, size, size, 0x1000] {
        file.extend(number.to_le_bytes());
    }
    file.extend(TEXT.iter().flat_map(|instruction| instruction.to_le_bytes()));
    file
}

/// Checks of the simulated host itself.
pub fn on_the_host(progress: &mut Progress) -> Result<Vec<Check>> {
    let mut plan = Plan::default();
    plan.stat("loop", "loop", [("instructions:u", INSTRUCTIONS)].into_iter());
    plan.stat("loop", "loop", [("cycles:u", INSTRUCTIONS)].into_iter());
    let both = [("instructions:u", INSTRUCTIONS), ("cycles:u", INSTRUCTIONS)];
    plan.stat("loop", "loop together", both.into_iter());
    plan.sample_at("loop", "cycles:u", PERIOD, &format!("{BRANCH:x}"), INSTRUCTIONS / PERIOD);
    let scenario =
        Scenario::new(plan.script.clone()).host(default_host(Arch::Riscv64)).program(program(), "loop");
    let numbers = numbers(&scenario, progress)?;
    Ok(plan.check("riscv64", &numbers))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_where_its_header_says() {
        let program = program();
        let double = |at: usize| u64::from_le_bytes(program[at..at + 8].try_into().unwrap());
        assert_eq!(program.len(), HEADERS + 20);
        // Its entry, its segment's place in the file, in memory, and its size.
        assert_eq!(
            (double(24), double(72), double(80), double(96)),
            (START, 0, 0x10000, program.len() as u64)
        );
        assert_eq!(program[HEADERS..HEADERS + 4], TEXT[0].to_le_bytes());
    }
}
