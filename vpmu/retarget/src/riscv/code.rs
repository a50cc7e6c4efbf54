//! The position-independent code that is put into a kernel. It makes SBI calls.
//!
//! An SBI call takes the extension in a7 and the function in a6. It returns an error in a0 and a value in a1, and
//! preserves all other registers (SBI specification, "Binary Encoding").

use super::assembler::Assembler;
use super::encode::{RET, add, addi, jump, ld, lui, sd};
use super::register::Register;
use super::{EXTENSION, READ_COUNTER, READ_OVERFLOWS};

/// The first counter CSR, `cycle`.
pub const FIRST_COUNTER: u16 = 0xc00;
const ECALL: u32 = 0x0000_0073;
/// Immediate of the ADDI that loads an id, both of [`EXTENSION`] and of the SBI PMU extension.
pub const ID_LOW: i32 = -683;
/// Immediate of the LUI that loads [`EXTENSION`].
pub const ID_HIGH: u32 = 0x9505;

const _: () = assert!(((ID_HIGH as u64) << 12) - 683 == EXTENSION);

/// Returns the instructions that call a function of [`EXTENSION`].
pub fn call(function: u64) -> [u32; 4] {
    let function = i32::try_from(function).expect("a function's number fits an immediate");
    [
        addi(Register::A6, Register::ZERO, function),
        lui(Register::A7, ID_HIGH),
        addi(Register::A7, Register::A7, ID_LOW),
        ECALL,
    ]
}

/// Returns the instruction that replaces the read of a counter CSR in the kernel's switch: it loads the CSR's number,
/// minus [`WRAP`], for [`read_counter`].
pub fn counter_number(csr: u16) -> u32 {
    // The number itself is larger than a signed 12-bit immediate can be.
    addi(Register::A0, Register::ZERO, i32::from(csr) - WRAP)
}

/// Range of a 12-bit immediate.
const WRAP: i32 = 1 << 12;

/// Returns the code that reads the counter loaded by [`counter_number`], and returns from the kernel's function with
/// its value.
pub fn read_counter() -> Vec<u32> {
    // Adds WRAP again.
    let number = [lui(Register::A7, 1), add(Register::A0, Register::A0, Register::A7)];
    let value = [addi(Register::A0, Register::A1, 0), RET];
    [number.as_slice(), &call(READ_COUNTER), &value].concat()
}

/// Returns the code at `at` that reads the counter loaded by [`counter_number`] by a function of the stub, which
/// returns from the kernel's function. Returns `None` if the function is out of reach.
pub fn read_counter_by(at: usize, function: usize) -> Option<Vec<u32>> {
    let mut code = Assembler::new(at);
    code.far_jump(Register::A7, Register::ZERO, function);
    code.finish()
}

/// Returns the two instructions at `at` that call a function. Returns `None` if it is out of reach.
pub fn far_call(at: usize, function: usize) -> Option<Vec<u32>> {
    let mut code = Assembler::new(at);
    code.far_jump(Register::RA, Register::RA, function);
    code.finish()
}

/// Maximum length of the code of [`read_overflows`] and [`read_overflows_by`].
pub const READ_OVERFLOWS_LEN: usize = 16 * 4;

/// Returns the code that reads `scountovf` into a register, keeps all other registers, and jumps to the instruction
/// after `site`. The code is for offset `at`. Returns `None` if the jump does not reach.
pub fn read_overflows(at: usize, register: Register, site: usize) -> Option<Vec<u32>> {
    const SAVED: [Register; 4] = [Register::A0, Register::A1, Register::A6, Register::A7];
    const FRAME: i32 = 32;
    let slots = || SAVED.into_iter().zip((0..).step_by(8));
    // If the register is saved, the value replaces its saved one, and is loaded with the others.
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

/// Does the same as [`read_overflows`] by a function of the stub, which leaves the value at the top of the stack.
pub fn read_overflows_by(at: usize, register: Register, site: usize, function: usize) -> Option<Vec<u32>> {
    const FRAME: i32 = 16;
    let mut code = Assembler::new(at);
    code.word(addi(Register::SP, Register::SP, -FRAME));
    code.word(sd(Register::RA, 8, Register::SP));
    code.far_jump(Register::RA, Register::RA, function);
    code.word(ld(Register::RA, 8, Register::SP));
    code.word(ld(register, 0, Register::SP));
    code.word(addi(Register::SP, Register::SP, FRAME));
    code.word(jump(code.here(), site + 4)?);
    code.finish()
}
