//! Names the architecture of a kernel that was built for another architecture.

use super::bytes::{u16_at, u32_at};

/// Returns the architecture of a kernel that is not an ELF file. It is detected by the 64-byte headers of
/// `Documentation/arch/arm64/booting` and `arch/riscv/boot-image-header`, the header of a bzImage, and the PE header of
/// kernels that are EFI programs.
pub fn architecture(head: &[u8]) -> Option<&'static str> {
    match head.get(56..60)? {
        b"ARM\x64" => return Some("aarch64"),
        b"RSC\x05" => return Some("RISC-V"),
        _ => {}
    }
    if head.get(0x202..0x206) == Some(b"HdrS") {
        return Some("x86-64");
    }
    let pe = u32_at(head, 60)? as usize;
    if !head.starts_with(b"MZ") || head.get(pe..)?.get(..4)? != b"PE\0\0" {
        return None;
    }
    match u16_at(head, pe.checked_add(4)?)? {
        0xaa64 => Some("aarch64"),
        0x5064 => Some("RISC-V"),
        0x6264 => Some("LoongArch"),
        0x8664 => Some("x86-64"),
        _ => None,
    }
}

/// Returns the architecture of an ELF file, by `e_machine` in the ELF header.
pub fn elf_machine(machine: u16) -> &'static str {
    match machine {
        2 | 18 | 43 => "SPARC",
        3 => "i386",
        8 => "MIPS",
        15 => "PA-RISC",
        20 => "PowerPC",
        21 => "PowerPC64",
        22 => "s390",
        40 => "ARM",
        50 => "IA-64",
        62 => "x86-64",
        183 => "aarch64",
        243 => "RISC-V",
        258 => "LoongArch",
        _ => "another architecture",
    }
}
