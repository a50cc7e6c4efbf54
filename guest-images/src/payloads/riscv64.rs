//! The programs for RISC-V. They are encoded here instruction by instruction, so that no RISC-V toolchain is needed.

/// RISC-V has no I/O ports.
pub const OUTB: Option<&[u8]> = None;
/// There are no event-based branches.
pub const EBB_HEADER: Option<&[u8]> = None;

/// `loop` for Linux guests. It executes [`super::LOOP_INSTRUCTIONS`] and exits.
pub const LOOP: &[u8] = &bytes::<_, { 4 * WORDS as usize }>(LOOP_WORDS);
/// Number of branches among them.
pub const LOOP_BRANCHES: u64 = 10_000_000;
/// Address of the loop in [`LOOP`]. Two instructions come before the loop, which has two itself, so each time this
/// address is reached, the number of executed instructions is even.
pub const LOOP_START: u32 = BASE + 4 * (HEADERS + 2);

/// A kernel that writes [`DEBUG_EXIT_NUMBER`] to the debug-exit register, and then loops.
pub const DEBUG_EXIT: &[u8] = &bytes::<_, { 4 * KERNEL_WORDS as usize }>(DEBUG_EXIT_WORDS);
/// The number written by [`DEBUG_EXIT`]. It differs from other statuses.
pub const DEBUG_EXIT_NUMBER: u8 = 21;

/// Size of the ELF header and of one program header. All sizes here are in words of four bytes.
const HEADERS: u32 = 16 + 14;
/// Size of the file, headers included.
const WORDS: u32 = HEADERS + 6;
/// Address at which the file is loaded.
const BASE: u32 = 0x10000;

/// An ELF executable (System V ABI, chapters 4 and 5).
const LOOP_WORDS: [u32; WORDS as usize] = [
    u32::from_le_bytes(*b"\x7fELF"),
    0x0001_0102, // 64 bits, little-endian, version 1
    0,
    0,
    0x00f3_0002, // an executable, for RISC-V
    1,
    BASE + 4 * HEADERS, // entry point
    0,
    64, // offset of the program header
    0,
    0, // no sections
    0,
    0,             // no flags
    64 | 56 << 16, // sizes of the ELF header and of a program header
    1,             // one program header
    0,
    1, // PT_LOAD
    5, // flags: read and execute
    0, // offset in the file
    0,
    BASE, // virtual address
    0,
    BASE, // physical address
    0,
    4 * WORDS, // size in the file
    0,
    4 * WORDS, // size in memory
    0,
    0x1000, // alignment
    0,
    0x0098_9537, // lui a0, 0x989
    0x6805_0513, // addi a0, a0, 0x680: ten million
    0xfff5_0513, // addi a0, a0, -1
    0xfe05_1ee3, // bnez a0, -4
    0x05d0_0893, // li a7, 93: the system call exit, with status 0 in a0
    0x0000_0073, // ecall
];

/// Size of the kernel, in words.
const KERNEL_WORDS: u32 = 20;

/// A kernel in the format of Linux's RISC-V boot images (Linux, `Documentation/arch/riscv/boot-image-header.rst`).
const DEBUG_EXIT_WORDS: [u32; KERNEL_WORDS as usize] = [
    0x0400_006f, // j 64
    0,
    0x20_0000, // load offset from the start of memory
    0,
    4 * KERNEL_WORDS, // image size
    0,
    0, // no flags
    0,
    2, // the header's version, 0.2
    0,
    0,
    0,
    u32::from_le_bytes(*b"RISC"),
    u32::from_le_bytes(*b"V\0\0\0"),
    u32::from_le_bytes(*b"RSC\x05"),
    0,
    0x0010_0537,                                    // lui a0, 0x100
    0x0000_0593 | (DEBUG_EXIT_NUMBER as u32) << 20, // li a1, the number
    0x00b5_0023,                                    // sb a1, 0(a0)
    0x0000_006f,                                    // j 0
];

const fn bytes<const N: usize, const LEN: usize>(words: [u32; N]) -> [u8; LEN] {
    assert!(LEN == 4 * N);
    let mut bytes = [0; LEN];
    let mut at = 0;
    while at < bytes.len() {
        bytes[at] = words[at / 4].to_le_bytes()[at % 4];
        at += 1;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_elf_header_describes_the_program() {
        let double = |at: usize| u64::from_le_bytes(LOOP[at..at + 8].try_into().unwrap());
        let (entry, segments, offset, base, size) =
            (double(24), double(32), double(72), double(80), double(96));
        assert_eq!((segments, offset, size), (64, 0, LOOP.len() as u64));
        let text = usize::try_from(entry - base).unwrap();
        assert_eq!(LOOP[text..][..4], 0x0098_9537_u32.to_le_bytes());
        assert_eq!(u64::from(LOOP_START), entry + 8);
    }
}
