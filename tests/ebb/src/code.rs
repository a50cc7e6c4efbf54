//! Code of known length.

use std::arch::asm;

/// Runs a loop of two instructions, `DEC` and `JNZ`. Returns their addresses.
pub fn spin(times: u64) -> [u64; 2] {
    let (dec, jnz): (u64, u64);
    // SAFETY: changes these registers only.
    unsafe {
        asm!(
            "lea {dec}, [rip + 2f]",
            "lea {jnz}, [rip + 3f]",
            "test {times}, {times}",
            "jz 4f",
            "2: dec {times}",
            "3: jnz 2b",
            "4:",
            times = inout(reg) times => _,
            dec = out(reg) dec,
            jnz = out(reg) jnz,
        );
    }
    [dec, jnz]
}

/// Runs such a loop with something in the 128 bytes below the stack pointer, in a vector register and in the flags.
/// Returns whether all of it is still there at the end.
pub fn spin_with_all_in_use(times: u64) -> bool {
    let (low, high, carry, vector): (u64, u64, u64, u64);
    // SAFETY: writes to the red zone only, which is the assembly's as it calls nothing.
    unsafe {
        asm!(
            "mov qword ptr [rsp - 8], {times}",
            "mov qword ptr [rsp - 128], {times}",
            "movq xmm5, {times}",
            "mov {carry}, {times}",
            "stc",
            // DEC leaves the carry flag alone.
            "2: dec {carry}",
            "jnz 2b",
            "sbb {carry}, {carry}",
            "movq {vector}, xmm5",
            "mov {low}, qword ptr [rsp - 8]",
            "mov {high}, qword ptr [rsp - 128]",
            times = in(reg) times,
            low = out(reg) low,
            high = out(reg) high,
            carry = out(reg) carry,
            vector = out(reg) vector,
            out("xmm5") _,
        );
    }
    [low, high, vector] == [times; 3] && carry == u64::MAX
}
