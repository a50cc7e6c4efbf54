//! Reads bzImage files. Their setup header contains the position of the compressed kernel in the file.
//!
//! The fields are those of the Linux/x86 boot protocol, "The Real-Mode Kernel Header".

use std::io::{Read, Seek};

use linux_loader::loader::bootparam::setup_header;
use vm_memory::ByteValued;

use super::elf::check_in_file;
use crate::loader::error::Problem;
use crate::loader::file::read_range;
use crate::loader::unpack::unpack;

const SETUP_HEADER: u64 = 0x1f1;
const MAGIC_AT: usize = 0x202;
const MAGIC: &[u8] = b"HdrS";
/// Version 2.12 introduced `xloadflags`, whose [`XLF_KERNEL_64`] marks a 64-bit kernel.
const OLDEST: u16 = 0x20c;
const XLF_KERNEL_64: u16 = 1;
const SECTOR: u64 = 512;

/// Returns true if `head` is the beginning of a bzImage.
pub fn is_bzimage(head: &[u8]) -> bool {
    head.get(MAGIC_AT..).is_some_and(|rest| rest.starts_with(MAGIC))
}

/// Returns the setup header and the unpacked vmlinux.
pub fn read(file: &mut (impl Read + Seek), len: u64) -> Result<(setup_header, Vec<u8>), Problem> {
    let header = read_header(file, len)?;
    if header.version < OLDEST {
        return Err(Problem::OldProtocol(header.version));
    }
    if header.xloadflags & XLF_KERNEL_64 == 0 {
        return Err(Problem::Not64Bit);
    }
    // "For backwards compatibility, if the setup_sects field contains 0, the real value is 4."
    let sectors = if header.setup_sects == 0 { 4 } else { u64::from(header.setup_sects) };
    let start = (sectors + 1) * SECTOR + u64::from(header.payload_offset);
    let end = start + u64::from(header.payload_length);
    check_in_file("compressed kernel", end, len)?;
    // Without Tally, the kernel unpacks itself within `init_size` bytes of memory, so the vmlinux cannot be larger.
    let vmlinux = unpack(file, start..end, header.init_size.into())?;
    Ok((header, vmlinux))
}

/// Reads the setup header. "The end of setup header can be calculated as follows: 0x0202 + byte value at offset
/// 0x0201". Fields that an older kernel's header does not have are zero.
fn read_header(file: &mut (impl Read + Seek), len: u64) -> Result<setup_header, Problem> {
    let mut header = setup_header::default();
    let known = SETUP_HEADER + header.as_slice().len() as u64;
    let jump = read_range(file, 0x201..0x202)?;
    let end = (0x202 + jump.first().copied().map_or(0, u64::from)).min(known);
    check_in_file("setup header", end, len)?;
    let bytes = read_range(file, SETUP_HEADER..end)?;
    header.as_mut_slice()[..bytes.len()].copy_from_slice(&bytes);
    Ok(header)
}
