//! Those for RISC-V. They are made here instruction by instruction, so that they are there on other machines, too, whose
//! toolchain need not know of RISC-V.

/// There are no ports to write to.
pub const OUTB: Option<&[u8]> = None;

/// `loop` for Linux guests: it executes [`super::LOOP_INSTRUCTIONS`] and ends.
pub const LOOP: &[u8] = &bytes::<_, { 4 * WORDS as usize }>(LOOP_WORDS);
/// How many of them are branches.
pub const LOOP_BRANCHES: u64 = 10_000_000;
/// Where [`LOOP`] loops: between its two instructions there and what is before them, it has executed an even number.
pub const LOOP_START: u32 = BASE + 4 * (HEADERS + 2);

/// A kernel that writes [`DEBUG_EXIT_NUMBER`] to the debug exit, and then loops.
pub const DEBUG_EXIT: &[u8] = &bytes::<_, { 4 * KERNEL_WORDS as usize }>(DEBUG_EXIT_WORDS);
/// A number whose place in a status can be told from others.
pub const DEBUG_EXIT_NUMBER: u8 = 21;

/// The size of an ELF file's header and that of its one segment, in words of four bytes, as all is here.
const HEADERS: u32 = 16 + 14;
/// The size of the program and of its file.
const WORDS: u32 = HEADERS + 6;
/// Where the file is in memory.
const BASE: u32 = 0x10000;

/// A program as Linux loads it (System V ABI, chapters 4 and 5).
const LOOP_WORDS: [u32; WORDS as usize] = [
    u32::from_le_bytes(*b"\x7fELF"),
    0x0001_0102, // 64 bits, little-endian, version 1
    0,
    0,
    0x00f3_0002, // an executable, for RISC-V
    1,
    BASE + 4 * HEADERS, // where it starts
    0,
    64, // where its segment is described
    0,
    0, // no sections
    0,
    0,             // no flags
    64 | 56 << 16, // the sizes of this header, and of a segment's
    1,             // one segment
    0,
    1, // which is loaded
    5, // to be read and executed,
    0, // from here in the file
    0,
    BASE, // to here
    0,
    BASE,
    0,
    4 * WORDS, // with this size in the file and in memory,
    0,
    4 * WORDS,
    0,
    0x1000, // and begins with a page.
    0,
    0x0098_9537, // lui a0, 0x989
    0x6805_0513, // addi a0, a0, 0x680: ten million
    0xfff5_0513, // addi a0, a0, -1
    0xfe05_1ee3, // bnez a0, -4
    0x05d0_0893, // li a7, 93: the system call that ends a program, with 0 here
    0x0000_0073, // ecall
];

/// The size of the kernel, in words.
const KERNEL_WORDS: u32 = 20;

/// A kernel as boot loaders take it (Linux, `Documentation/arch/riscv/boot-image-header.rst`).
const DEBUG_EXIT_WORDS: [u32; KERNEL_WORDS as usize] = [
    0x0400_006f, // j 64
    0,
    0x20_0000, // it wants to be 2 MiB behind the memory's beginning
    0,
    4 * KERNEL_WORDS, // this is its size
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
    fn the_loop_is_where_its_header_says() {
        let double = |at: usize| u64::from_le_bytes(LOOP[at..at + 8].try_into().unwrap());
        let (entry, segments, offset, base, size) =
            (double(24), double(32), double(72), double(80), double(96));
        assert_eq!((segments, offset, size), (64, 0, LOOP.len() as u64));
        let text = usize::try_from(entry - base).unwrap();
        assert_eq!(LOOP[text..][..4], 0x0098_9537_u32.to_le_bytes());
        assert_eq!(u64::from(LOOP_START), entry + 8);
    }
}
