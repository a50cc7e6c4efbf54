//! Reads Linux' `Image` for RISC-V: uncompressed, compressed by gzip, or compressed in an EFI program
//! (`Documentation/arch/riscv/boot-image-header`, `boot`).
//!
//! The format is all that is known here, so hosts of every architecture can read and test it. How such a kernel is
//! loaded and patched is in `arch/riscv64/loader.rs`.

use std::io::{Read, Seek};

use super::bytes::{u16_at, u32_at, u64_at};
use super::error::Problem;
use super::file::read_range;
use super::foreign;
use super::unpack::unpack;

/// Name of the architecture, for messages.
const NAME: &str = "RISC-V";
/// Error for a file of another format.
const FORMATS: &str = "no Linux Image, packed or not";

const MAGIC: &[u8] = b"RSC\x05";
const GZIP: &[u8] = &[0x1f, 0x8b];
/// Magic number of an EFI program that decompresses a kernel. It follows "MZ" and two more bytes.
const PACKED: &[u8] = b"zimg";

/// Where a kernel wants to be, according to its header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Offset from the beginning of RAM at which the kernel is loaded.
    pub offset: u64,
    /// Size of memory that the kernel needs.
    pub len: u64,
}

/// Reads a kernel. Also returns its unpacked image.
pub fn read(file: &mut (impl Read + Seek), len: u64) -> Result<(Place, Vec<u8>), Problem> {
    let head = read_range(file, 0..len.min(4096))?;
    let image = if head.starts_with(GZIP) {
        unpack(file, 0..len, u64::MAX)?
    } else if head.starts_with(b"MZ") && head.get(4..8) == Some(PACKED) {
        unpacked(file, &head, len)?
    } else if is_image(&head) {
        read_range(file, 0..len)?
    } else {
        return Err(wrong(&head));
    };
    if !is_image(&image) {
        return Err(wrong(&image[..image.len().min(4096)]));
    }
    let number = |at| u64_at(&image, at).ok_or(Problem::Damaged("it is shorter than its header"));
    // The header may state a size of 0. The kernel then needs the size of its image.
    let len = number(16)?.max(image.len() as u64);
    Ok((Place { offset: number(8)?, len }, image))
}

fn is_image(head: &[u8]) -> bool {
    head.get(56..60) == Some(MAGIC)
}

/// Reads the kernel out of an EFI program that decompresses it (`drivers/firmware/efi/libstub/zboot-header.S`).
fn unpacked(file: &mut (impl Read + Seek), head: &[u8], len: u64) -> Result<Vec<u8>, Problem> {
    const SHORT: Problem = Problem::Damaged("it is shorter than its header");
    let number = |at| u32_at(head, at).map(u64::from).ok_or(SHORT);
    let (start, size) = (number(8)?, number(12)?);
    // The uncompressed size is the last field of gzip's format. For other compressions the kernel's build appends it.
    let size_len = if head.get(24..28) == Some(b"gzip") { 0 } else { 4 };
    let end = start + size + size_len;
    if end > len {
        return Err(Problem::Truncated { what: "packed kernel", needs: end, has: len });
    }
    unpack(file, start..end, u64::MAX)
}

/// Returns an error for a kernel of another architecture.
fn built_for(built: &'static str) -> Problem {
    Problem::Architecture { built, host: NAME }
}

/// Returns an error for a file of another format.
fn wrong(head: &[u8]) -> Problem {
    if head.starts_with(b"\x7fELF") {
        return match u16_at(head, 18) {
            Some(machine) if foreign::elf_machine(machine) != NAME => {
                built_for(foreign::elf_machine(machine))
            }
            _ => Problem::OtherElf("an ELF file, where the kernel's build makes an Image of it"),
        };
    }
    foreign::architecture(head).map_or(Problem::NotAKernel(FORMATS), built_for)
}

#[cfg(test)]
mod tests {
    use std::io::{Cursor, Write};

    use super::*;

    fn image(len: usize) -> Vec<u8> {
        let mut image = vec![0x13; len];
        image[8..16].copy_from_slice(&0x20_0000_u64.to_le_bytes());
        image[16..24].copy_from_slice(&(len as u64 + 4096).to_le_bytes());
        image[56..60].copy_from_slice(MAGIC);
        image
    }

    fn read(file: &[u8]) -> Result<(Place, Vec<u8>), Problem> {
        super::read(&mut Cursor::new(file), file.len() as u64)
    }

    #[test]
    fn an_uncompressed_image_is_read_whole() {
        let (place, content) = read(&image(8192)).unwrap();
        assert_eq!(place, Place { offset: 0x20_0000, len: 12288 });
        assert_eq!(content.len(), 8192);
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packed.write_all(bytes).unwrap();
        packed.finish().unwrap()
    }

    /// Returns an EFI program with a compressed kernel behind its headers.
    fn efi_program(how: [u8; 4], packed: &[u8]) -> Vec<u8> {
        let mut file = vec![0; 4096];
        file[..8].copy_from_slice(b"MZ\0\0zimg");
        file[8..12].copy_from_slice(&4096_u32.to_le_bytes());
        file[12..16].copy_from_slice(&u32::try_from(packed.len()).unwrap().to_le_bytes());
        file[24..28].copy_from_slice(&how);
        [&file, packed, b"what follows is not the kernel's"].concat()
    }

    #[test]
    fn a_packed_image_is_unpacked() {
        let image = image(8192);
        let packed = gzip(&image);
        for file in [packed.clone(), efi_program(*b"gzip", &packed)] {
            let (place, content) = read(&file).unwrap();
            assert!(content == image);
            assert_eq!(place.len, 12288);
        }
        let cut = &efi_program(*b"gzip", &packed)[..4096 + packed.len() - 1];
        let text = read(cut).err().unwrap().to_string();
        assert!(text.contains("truncated"), "{text}");
    }

    #[test]
    fn errors_name_the_architecture_of_other_architectures_kernels() {
        let mut bzimage = vec![0; 4096];
        bzimage[0x202..0x206].copy_from_slice(b"HdrS");
        let mut aarch64 = vec![0; 4096];
        aarch64[56..60].copy_from_slice(b"ARM\x64");
        let elf = |machine| [b"\x7fELF\x02\x01\x01", &[0; 9][..], &[2, 0, machine, 0], &[0; 44]].concat();
        let packed = gzip(&aarch64);
        for (file, name) in [
            (bzimage, "x86-64"),
            (elf(62), "x86-64"),
            (elf(183), "aarch64"),
            (aarch64, "aarch64"),
            (efi_program(*b"gzip", &packed), "aarch64"),
            (packed, "aarch64"),
        ] {
            let text = read(&file).err().unwrap().to_string();
            assert_eq!(text, format!("built for {name}, this host is RISC-V"));
        }
        let own = read(&elf(243)).err().unwrap().to_string();
        assert!(own.contains("the kernel's build makes an Image of it"), "{own}");
    }
}
