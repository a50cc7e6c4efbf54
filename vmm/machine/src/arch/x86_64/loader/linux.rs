//! Loads Linux by its 64-bit boot protocol (Linux/x86 boot protocol, "64-bit Boot Protocol"): the unpacked kernel at
//! its link address, the zero page, the command line and the initrd.
//!
//! The kernel is not relocated, so it runs without KASLR.

use std::io::{Cursor, Read, Seek};
use std::ops::Range;
use std::path::Path;

use linux_loader::configurator::linux::LinuxBootConfigurator;
use linux_loader::configurator::{BootConfigurator, BootParams};
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use serde::{Deserialize, Serialize};
use vm_memory::{ByteValued, Bytes, GuestAddress};

use super::elf::{Class, Elf};
use super::segment::{self, Segment, page_down, page_up};
use super::{Entry, bzimage};
use crate::arch::x86_64::memory::{self, HIGH_RAM, RangeKind, low};
use crate::loader::error::{LoadError, Problem};
use crate::loader::file::{UserFile, read_range};
use crate::loader::kernel::Boot;
use crate::memory::GuestRam;

const BOOT_FLAG: u16 = 0xaa55;
const HEADER_MAGIC: u32 = u32::from_le_bytes(*b"HdrS");
const PROTOCOL: u16 = 0x020f;
/// Boot loader ID "Undefined", for loaders without an assigned ID.
const LOADER_UNDEFINED: u8 = 0xff;
const LOADED_HIGH: u8 = 1 << 0;
/// Set by the kernel's own decompressor if it applied KASLR. The decompressor does not run here.
const KASLR_FLAG: u8 = 1 << 1;
const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;
/// `cmdline_size` in the header of every bzImage: `COMMAND_LINE_SIZE` of x86 without the NUL.
const COMMAND_LINE_MAX: u32 = 2047;
/// Space for the command line at [`low::COMMAND_LINE`]. A header may allow more than that.
const COMMAND_LINE_ROOM: usize = 64 << 10;
/// `initrd_addr_max` in the header of every 64-bit bzImage.
const INITRD_ADDR_MAX: u32 = 0x7fff_ffff;
/// `__START_KERNEL_map`: lowest virtual address to which kernels are linked.
const KERNEL_MAP: u64 = 0xffff_ffff_8000_0000;

/// Length of the header of a `struct setup_data`.
pub const SETUP_DATA_HEADER: usize = 16;

/// A Linux kernel whose file has been read.
pub struct Linux {
    header: setup_header,
    elf: Elf,
    /// Memory that Linux has to reserve for the shared pages, by a `struct setup_data` at its start.
    pub setup_data: Option<Range<u64>>,
    /// True if programs can read counters with RDPMC, by code that was added to the kernel.
    pub has_rdpmc_in_programs: bool,
    /// Address of a SYSRET, if it is known without a search.
    pub sysret: Option<u64>,
}

/// A Linux kernel without its image.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedLinux {
    header: Vec<u8>,
    elf: Elf,
    setup_data: Option<Range<u64>>,
    has_rdpmc_in_programs: bool,
    sysret: Option<u64>,
}

impl Linux {
    /// Reads a vmlinux. The image ends with the last segment.
    pub fn read_vmlinux(file: &mut (impl Read + Seek), len: u64) -> Result<(Self, Vec<u8>), Problem> {
        let elf = read_elf(file, len)?;
        let image = read_range(file, 0..elf.file_end())?;
        let header = setup_header {
            boot_flag: BOOT_FLAG,
            header: HEADER_MAGIC,
            version: PROTOCOL,
            loadflags: LOADED_HIGH,
            initrd_addr_max: INITRD_ADDR_MAX,
            cmdline_size: COMMAND_LINE_MAX,
            ..Default::default()
        };
        Ok((Self { header, elf, setup_data: None, has_rdpmc_in_programs: false, sysret: None }, image))
    }

    /// Reads and unpacks a bzImage.
    pub fn read_bzimage(file: &mut (impl Read + Seek), len: u64) -> Result<(Self, Vec<u8>), Problem> {
        let (header, image) = bzimage::read(file, len)?;
        let elf = read_elf(&mut Cursor::new(&image), image.len() as u64)?;
        Ok((Self { header, elf, setup_data: None, has_rdpmc_in_programs: false, sysret: None }, image))
    }

    /// Returns what to keep of the kernel beside its image, with the address of a SYSRET in it.
    pub fn saved(&self, sysret: Option<u64>) -> SavedLinux {
        let Self { header, elf, setup_data, has_rdpmc_in_programs, .. } = self;
        SavedLinux {
            header: header.as_slice().to_vec(),
            elf: elf.clone(),
            setup_data: setup_data.clone(),
            has_rdpmc_in_programs: *has_rdpmc_in_programs,
            sysret,
        }
    }

    /// Returns a kernel that was kept, or `None` if its header has another size.
    pub fn restored(saved: SavedLinux) -> Option<Self> {
        let SavedLinux { header, elf, setup_data, has_rdpmc_in_programs, sysret } = saved;
        let mut copy = setup_header::default();
        let bytes = copy.as_mut_slice();
        if bytes.len() != header.len() {
            return None;
        }
        bytes.copy_from_slice(&header);
        Some(Self { header: copy, elf, setup_data, has_rdpmc_in_programs, sysret })
    }

    /// Returns the segments to load.
    pub fn segments(&self) -> &[Segment] {
        &self.elf.segments
    }

    /// Writes the kernel, the command line, the initrd and the zero page into the guest's memory.
    pub fn load(&self, path: &Path, image: &[u8], boot: &Boot) -> Result<Entry, LoadError> {
        self.place(image, boot).map_err(|problem| problem.with(path))?;
        let initrd = match boot.initrd {
            Some(initrd) => self.place_initrd(boot.initrd_prefix, initrd, boot.ram)?,
            None => Initrd { at: 0, len: 0 },
        };
        self.write_zero_page(boot, &initrd).map_err(|problem| problem.with(path))?;
        Ok(Entry::Long { rip: self.elf.entry, boot_params: low::ZERO_PAGE })
    }

    fn place(&self, image: &[u8], boot: &Boot) -> Result<(), Problem> {
        if let Some(low) = self.elf.segments.iter().find(|s| s.memory.start < HIGH_RAM) {
            return Err(Problem::Reserved { start: low.memory.start, end: low.memory.end });
        }
        segment::check_end("the kernel", self.end(), boot.ram)?;
        segment::place(&self.elf.segments, image, boot.ram)?;

        let max = (self.header.cmdline_size as usize).min(COMMAND_LINE_ROOM);
        let len = boot.command_line.len();
        if len > max {
            return Err(Problem::CommandLine { len, max });
        }
        let mut line = boot.command_line.as_bytes().to_vec();
        line.push(0);
        write(boot.ram, &line, low::COMMAND_LINE)
    }

    /// Returns the end of the memory that the kernel uses before it reads the memory map: its segments with their
    /// zeroes, and the `init_size` bytes that its header requires.
    fn end(&self) -> u64 {
        let start = self.elf.segments.iter().map(|s| s.memory.start).min().unwrap_or(0);
        segment::end(&self.elf.segments).max(start.saturating_add(self.header.init_size.into()))
    }

    /// Writes the initrd, with `prefix` before it, to the highest possible address. The kernel may use the memory right
    /// after itself.
    fn place_initrd(&self, prefix: &[u8], path: &Path, ram: &GuestRam) -> Result<Initrd, LoadError> {
        let file = UserFile::open(path)?;
        let prefix_len = prefix.len() as u64;
        let len = file.len.saturating_add(prefix_len);
        let kernel_end = page_up(self.end());
        let limit = u64::from(self.header.initrd_addr_max) + 1;
        let needs = kernel_end.saturating_add(page_up(len));
        let at = page_down(memory::low_end(ram.size()).min(limit).saturating_sub(len));
        if needs > limit {
            return Err(file.error(Problem::InitrdTooLarge { limit, kernel_end }));
        }
        if at < kernel_end {
            return Err(file.error(segment::too_small("the initrd", needs, ram)));
        }
        write(ram, prefix, at).map_err(|problem| file.error(problem))?;
        file.place(ram, at + prefix_len)?;
        Ok(Initrd { at, len })
    }

    fn write_zero_page(&self, boot: &Boot, initrd: &Initrd) -> Result<(), Problem> {
        const UNREACHABLE: Problem = Problem::Damaged("it needs addresses above 4 GiB");
        let address = |at| u32::try_from(at).map_err(|_| UNREACHABLE);
        let mut params = boot_params { hdr: self.header, acpi_rsdp_addr: low::ACPI, ..Default::default() };
        params.hdr.type_of_loader = LOADER_UNDEFINED;
        params.hdr.loadflags &= !KASLR_FLAG;
        params.hdr.setup_data = self.setup_data.as_ref().map_or(0, |data| data.start);
        if let Some(data) = &self.setup_data {
            write(boot.ram, &setup_data_header(data), data.start)?;
        }
        params.hdr.cmd_line_ptr = address(low::COMMAND_LINE)?;
        params.hdr.ramdisk_image = address(initrd.at)?;
        params.hdr.ramdisk_size = address(initrd.len)?;
        let map = memory::map(boot.ram.size());
        for (entry, range) in params.e820_table.iter_mut().zip(&map) {
            let kind = match range.kind {
                RangeKind::Ram => E820_RAM,
                RangeKind::Reserved => E820_RESERVED,
            };
            *entry = boot_e820_entry { addr: range.start, size: range.len, r#type: kind };
            params.e820_entries += 1;
        }
        let params = BootParams::new(&params, GuestAddress(low::ZERO_PAGE));
        LinuxBootConfigurator::write_bootparams(&params, &boot.ram.mapped).map_err(|_| Problem::Memory {
            what: "the zero page",
            needs: HIGH_RAM,
            has: memory::low_end(boot.ram.size()),
        })
    }
}

/// Type of the `struct setup_data`. Linux does not know this type and therefore only reserves the memory.
const SETUP_TALLY: u32 = u32::from_le_bytes(*b"Tall");

/// Returns the header of the only `struct setup_data`: no next entry, the type, and the length of the data after the
/// header.
fn setup_data_header(data: &Range<u64>) -> [u8; SETUP_DATA_HEADER] {
    let len = u32::try_from(data.end - data.start).unwrap_or(0).saturating_sub(16);
    let mut header = [0; SETUP_DATA_HEADER];
    header[8..12].copy_from_slice(&SETUP_TALLY.to_le_bytes());
    header[12..].copy_from_slice(&len.to_le_bytes());
    header
}

struct Initrd {
    at: u64,
    len: u64,
}

fn read_elf(file: &mut (impl Read + Seek), len: u64) -> Result<Elf, Problem> {
    let elf = Elf::read(file, len)?;
    if elf.class != Class::Bits64 {
        return Err(Problem::Not64Bit);
    }
    if elf.segments.iter().all(|s| s.virtual_address < KERNEL_MAP) {
        return Err(Problem::OtherElf("an ELF program without kernel addresses or a multiboot header"));
    }
    if !segment::contain(&elf.segments, elf.entry) {
        return Err(Problem::Entry(elf.entry));
    }
    Ok(elf)
}

fn write(ram: &GuestRam, bytes: &[u8], at: u64) -> Result<(), Problem> {
    let end = at + bytes.len() as u64;
    ram.mapped
        .write_slice(bytes, GuestAddress(at))
        .map_err(|_| segment::too_small("the command line", end, ram))
}

#[cfg(test)]
mod tests;
