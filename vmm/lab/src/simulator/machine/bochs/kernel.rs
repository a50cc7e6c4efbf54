//! Boots a Linux kernel from memory. Bochs loads images into memory before the BIOS starts, and an option ROM
//! (`programs/boot.rom.S`) takes the place of the BIOS's boot from a disk.
//!
//! The image is started by its real-mode code (Linux, Documentation/arch/x86/boot.rst), which asks the BIOS for the
//! memory's layout.

use std::fs::{self, File};
use std::path::Path;

use super::memory_file;
use crate::error::{Error, Result};

/// The option ROM, without its checksum.
const ROM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/boot.rom"));

/// Addresses of the real-mode code and of the command line. The BIOS uses memory from 0x30000.
const SETUP: u32 = 0x10000;
const COMMAND_LINE: u32 = 0x20000;
/// Address at which kernels of this protocol are loaded.
const KERNEL: u32 = 0x10_0000;
/// End of the real-mode code's heap, relative to `SETUP`: its stack begins there.
const HEAP_END: u16 = 0xe000;
/// Highest address of an initrd (the protocol's `initrd_addr_max`).
const INITRD_MAX: u64 = 0x7fff_ffff;
/// At the memory's end, the BIOS has its tables.
const BIOS_TABLES: u64 = 1 << 20;
const SECTOR: usize = 512;

/// Images that are in memory when the machine starts.
pub struct Images {
    pub rom: File,
    setup: File,
    command_line: File,
    kernel: File,
    initrd_address: u32,
}

impl Images {
    /// Returns the images in memory with their addresses.
    pub fn in_memory<'a>(&'a self, initrd: &'a File) -> [(&'a File, u32); 4] {
        [
            (&self.setup, SETUP),
            (&self.command_line, COMMAND_LINE),
            (&self.kernel, KERNEL),
            (initrd, self.initrd_address),
        ]
    }

    pub fn into_files(self) -> Vec<File> {
        vec![self.rom, self.setup, self.command_line, self.kernel]
    }
}

/// Prepares a kernel (a bzImage) with its command line and an initrd for a machine with this much memory.
pub fn images(kernel: &Path, initrd: &File, command_line: &str, memory: u64) -> Result<Images> {
    let image = fs::read(kernel).map_err(Error::file("read", kernel))?;
    let initrd_length = initrd.metadata().map_err(Error::system("look at the initrd"))?.len();
    let too_large = || Error::NoMemory { mib: memory >> 20 };
    let end = memory.min(INITRD_MAX + 1).checked_sub(BIOS_TABLES).ok_or_else(too_large)?;
    let initrd_address = end.checked_sub(initrd_length).ok_or_else(too_large)? & !0xfff;
    if initrd_address <= u64::from(KERNEL) + image.len() as u64 {
        return Err(too_large());
    }
    let low = |number: u64| u32::try_from(number).map_err(|_| too_large());
    let (initrd_address, initrd_length) = (low(initrd_address)?, low(initrd_length)?);
    let (setup, protected) = split(&image).ok_or_else(|| Error::NoKernel(kernel.to_owned()))?;
    let setup = with_fields(setup, initrd_address, initrd_length);
    Ok(Images {
        rom: memory_file("rom", &with_checksum(ROM))?,
        setup: memory_file("setup", &setup)?,
        command_line: memory_file("command-line", &[command_line.as_bytes(), b"\0"].concat())?,
        kernel: memory_file("kernel", protected)?,
        initrd_address,
    })
}

/// Splits a bzImage into the sectors of its real-mode code and the rest.
fn split(image: &[u8]) -> Option<(&[u8], &[u8])> {
    const SECTORS: usize = 0x1f1;
    const MAGIC: usize = 0x202;
    if image.get(MAGIC..MAGIC + 4)? != b"HdrS" {
        return None;
    }
    let sectors = match image[SECTORS] {
        0 => 4,
        sectors => usize::from(sectors),
    };
    image.split_at_checked((sectors + 1) * SECTOR)
}

/// Fills in what a boot loader writes to the real-mode code's header.
fn with_fields(setup: &[u8], initrd_address: u32, initrd_length: u32) -> Vec<u8> {
    const LOADFLAGS: usize = 0x211;
    const CAN_USE_HEAP: u8 = 0x80;
    const UNKNOWN_LOADER: u8 = 0xff;
    const NORMAL_VIDEO_MODE: u16 = 0xffff;
    let mut setup = setup.to_vec();
    let mut set = |at: usize, bytes: &[u8]| setup[at..at + bytes.len()].copy_from_slice(bytes);
    set(0x1fa, &NORMAL_VIDEO_MODE.to_le_bytes());
    set(0x210, &[UNKNOWN_LOADER]);
    set(0x218, &initrd_address.to_le_bytes());
    set(0x21c, &initrd_length.to_le_bytes());
    set(0x224, &(HEAP_END - 0x200).to_le_bytes());
    set(0x228, &COMMAND_LINE.to_le_bytes());
    setup[LOADFLAGS] |= CAN_USE_HEAP;
    setup
}

/// Sets the last byte so that the sum of all bytes is zero, as the BIOS expects it.
fn with_checksum(rom: &[u8]) -> Vec<u8> {
    let sum = rom.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
    let mut rom = rom.to_vec();
    if let Some(last) = rom.last_mut() {
        *last = last.wrapping_sub(sum);
    }
    rom
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rom_has_the_signature_length_and_checksum_that_a_bios_looks_for() {
        let rom = with_checksum(ROM);
        assert_eq!(rom[..2], [0x55, 0xaa]);
        assert_eq!(usize::from(rom[2]) * SECTOR, rom.len());
        assert_eq!(rom.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)), 0);
    }

    #[test]
    fn a_kernel_is_split_after_its_real_mode_sectors() {
        let mut image = vec![0; 6 * SECTOR];
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x1f1] = 2;
        let (setup, rest) = split(&image).unwrap();
        assert_eq!((setup.len(), rest.len()), (3 * SECTOR, 3 * SECTOR));
        image[0x1f1] = 0;
        assert_eq!(split(&image).unwrap().1.len(), SECTOR);
        image[0x1f1] = 20;
        assert!(split(&image).is_none());
        assert!(split(b"\x7fELF").is_none());
    }
}
