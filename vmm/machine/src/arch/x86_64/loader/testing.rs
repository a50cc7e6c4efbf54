//! Small, complete images for tests.

use std::io::{Cursor, Write as _};
use std::path::Path;

use super::{Format, Kernel};
use crate::loader::error::LoadError;
use crate::memory::GuestRam;

/// An ELF64 vmlinux with a `.bss`. Its text has calls, so that the branch filters of decompressors have an effect.
/// `testdata/payload.*` are this file, compressed: see [`super::tests`].
pub const VMLINUX: &[u8] = include_bytes!("testdata/payload");
/// Physical addresses of [`VMLINUX`], up to the end of its `.bss`.
pub const VMLINUX_MEMORY: std::ops::Range<u64> = 0x10_0000..0x20_0000;
/// Entry point of [`VMLINUX`].
pub const VMLINUX_ENTRY: u64 = 0x10_0040;

/// Fields of an ELF file with one segment.
pub struct ElfFile {
    pub bits: u8,
    pub kind: u16,
    pub machine: u16,
    pub entry: u64,
    pub virtual_address: u64,
    pub physical_address: u64,
    pub memory_len: u64,
    pub content: Vec<u8>,
}

impl Default for ElfFile {
    fn default() -> Self {
        Self {
            bits: 64,
            kind: 2,
            machine: 62,
            entry: 0x10_0000,
            virtual_address: 0xffff_ffff_8010_0000,
            physical_address: 0x10_0000,
            memory_len: 0x2000,
            content: vec![0x90; 256],
        }
    }
}

impl ElfFile {
    /// Offset of the segment's bytes in the file.
    pub const CONTENT: usize = 128;

    pub fn build(&self) -> Vec<u8> {
        let wide = self.bits == 64;
        let mut file = b"\x7fELF\0\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
        file[4] = if wide { 2 } else { 1 };
        let mut put = |value: u64, len: usize| file.extend_from_slice(&value.to_le_bytes()[..len]);
        let word = if wide { 8 } else { 4 };
        let (header, entry) = if wide { (64, 56) } else { (52, 32) };
        let len = self.content.len() as u64;
        for (value, len) in [(self.kind.into(), 2), (self.machine.into(), 2), (1, 4), (self.entry, word)] {
            put(value, len);
        }
        for (value, len) in [(header, word), (0, word), (0, 4), (header, 2), (entry, 2), (1, 2)] {
            put(value, len);
        }
        for value in [0, 0, 0] {
            put(value, 2);
        }
        put(1, 4);
        if wide {
            put(5, 4);
        }
        for value in [Self::CONTENT as u64, self.virtual_address, self.physical_address, len, self.memory_len]
        {
            put(value, word);
        }
        put(5, if wide { 0 } else { 4 });
        put(0x1000, word);
        file.resize(Self::CONTENT, 0);
        file.extend_from_slice(&self.content);
        file
    }
}

/// Returns a bzImage with this payload, whatever the payload is.
pub fn bzimage(payload: &[u8], init_size: u32) -> Vec<u8> {
    let mut file = vec![0; 1024];
    let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
    put(0x1f1, &[1]);
    put(0x1fe, &[0x55, 0xaa, 0xeb, 0x6a]);
    put(0x202, b"HdrS");
    put(0x206, &0x20f_u16.to_le_bytes());
    put(0x211, &[1]);
    put(0x22c, &0x7fff_ffff_u32.to_le_bytes());
    put(0x236, &0x7f_u16.to_le_bytes());
    put(0x238, &2047_u32.to_le_bytes());
    put(0x248, &16_u32.to_le_bytes());
    put(0x24c, &u32::try_from(payload.len()).unwrap().to_le_bytes());
    put(0x258, &0x10_0000_u64.to_le_bytes());
    put(0x260, &init_size.to_le_bytes());
    file.extend_from_slice(&[0; 16]);
    file.extend_from_slice(payload);
    file.extend_from_slice(&[0xcc; 64]);
    file
}

/// Returns a payload followed by its unpacked size, as the kernel's build writes it.
pub fn with_size(packed: &[u8], size: usize) -> Vec<u8> {
    let mut payload = packed.to_vec();
    payload.extend_from_slice(&u32::try_from(size).unwrap().to_le_bytes());
    payload
}

/// Returns a multiboot header with its checksum.
pub fn multiboot_header(flags: u32, addresses: &[u32]) -> Vec<u8> {
    let magic = 0x1bad_b002_u32;
    let checksum = 0_u32.wrapping_sub(magic).wrapping_sub(flags);
    [&[magic, flags, checksum], addresses].concat().iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Returns a multiboot ELF image for this address.
pub fn multiboot_elf(address: u64) -> ElfFile {
    ElfFile {
        bits: 32,
        machine: 3,
        entry: address + 12,
        virtual_address: address,
        physical_address: address,
        content: [multiboot_header(0, &[]), vec![0xf4; 64]].concat(),
        ..ElfFile::default()
    }
}

/// Returns the result of [`Kernel::read`] for a file with this content and the name `kernel`.
pub fn read(content: &[u8]) -> Result<Kernel, LoadError> {
    let path = Path::new("kernel");
    let len = content.len() as u64;
    let (format, image) = Format::read(&mut Cursor::new(content), len).map_err(|p| p.with(path))?;
    Ok(Kernel::new(path, image, format))
}

/// Returns the error for a file with this content, which must not be a kernel.
pub fn refusal(content: &[u8]) -> String {
    read(content).err().expect("this was taken for a kernel").to_string()
}

/// Returns a guest's memory of `mib` MiB.
pub fn ram(mib: u64) -> GuestRam {
    GuestRam::new(&format!("{mib}M").parse().unwrap(), crate::arch::x86_64::memory::ranges).unwrap()
}

/// Creates a file with this content.
pub fn file(content: &[u8]) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(content).unwrap();
    file
}
