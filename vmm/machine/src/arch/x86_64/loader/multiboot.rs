//! Loads multiboot images (Multiboot Specification version 0.6.96): bare-metal payloads and test kernels.
//!
//! Where the specification leaves a choice, this loader does what QEMU does, because such kernels are written for QEMU.

use std::ffi::OsStr;
use std::io::{Read, Seek};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use vm_memory::{Bytes, GuestAddress};

use super::Entry;
use super::elf::{self, Elf, check_in_file};
use super::segment::{self, Segment, page_up};
use crate::arch::x86_64::memory::{self, HIGH_RAM, RangeKind, low};
use crate::loader::bytes::u32_at;
use crate::loader::error::{LoadError, Problem};
use crate::loader::file::{UserFile, read_range};
use crate::loader::kernel::Boot;
use crate::memory::GuestRam;

/// "The Multiboot header must be contained completely within the first 8192 bytes of the OS image" (3.1).
pub const SEARCHED: u64 = 8192;
const HEADER_MAGIC: u32 = 0x1bad_b002;
/// Supported requirements: "All boot modules ... must be aligned on page boundaries", which is always done, and
/// "information on available memory".
const REQUIREMENTS_MET: u32 = 1 << 0 | 1 << 1;
/// Flags 0 to 15 are requirements: a loader that does not support one of them must not boot the image (3.1.2).
const REQUIREMENTS: u32 = 0xffff;
const HAS_ADDRESSES: u32 = 1 << 16;

/// Multiboot header of an image.
#[derive(Debug, PartialEq, Eq)]
pub struct Header {
    offset: usize,
    flags: u32,
}

impl Header {
    /// Searches for a multiboot header in the first bytes of a file.
    pub fn find(head: &[u8]) -> Option<Self> {
        (0..head.len()).step_by(4).find_map(|offset| {
            let (magic, flags) = (u32_at(head, offset)?, u32_at(head, offset + 4)?);
            let sum = magic.wrapping_add(flags).wrapping_add(u32_at(head, offset + 8)?);
            (magic == HEADER_MAGIC && sum == 0).then_some(Self { offset, flags })
        })
    }
}

/// A multiboot image whose file has been read.
#[derive(Debug)]
pub struct Multiboot {
    segments: Vec<Segment>,
    entry: u32,
}

impl Multiboot {
    /// Reads the image with this header. `head` is the beginning of the file.
    pub fn read(
        header: &Header,
        head: &[u8],
        file: &mut (impl Read + Seek),
        len: u64,
    ) -> Result<(Self, Vec<u8>), Problem> {
        if header.flags & REQUIREMENTS & !REQUIREMENTS_MET != 0 {
            return Err(Problem::Features(header.flags));
        }
        let (segments, entry) = if header.flags & HAS_ADDRESSES != 0 {
            read_addresses(header, head, len)?
        } else if elf::is_elf(head) {
            let elf = Elf::read(file, len)?;
            (elf.segments, elf.entry)
        } else {
            return Err(Problem::Damaged("its multiboot header has no load addresses, and it is not ELF"));
        };
        if !segment::contain(&segments, entry) {
            return Err(Problem::Entry(entry));
        }
        let entry = u32::try_from(entry).map_err(|_| Problem::Entry(entry))?;
        let end = segments.iter().map(|s| s.file.end as u64).max().unwrap_or(0);
        let image = read_range(file, 0..end)?;
        Ok((Self { segments, entry }, image))
    }

    /// Returns the segments to load.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Returns the physical address of the first instruction.
    pub fn entry(&self) -> u32 {
        self.entry
    }

    /// Writes the image into the guest's memory, the modules above it, and the information structure where the image
    /// leaves room.
    pub fn load(&self, path: &Path, image: &[u8], boot: &Boot) -> Result<Entry, LoadError> {
        segment::place(&self.segments, image, boot.ram).map_err(|problem| problem.with(path))?;
        let mut free = page_up(segment::end(&self.segments).max(HIGH_RAM));
        let mut modules = Vec::new();
        for text in boot.initrd.map(split_modules).unwrap_or_default() {
            let module = Module::place(text, free, boot.ram)?;
            free = page_up(module.end.into());
            modules.push(module);
        }
        let info =
            Information { command_line: command_line(path, boot.command_line), modules, ram: boot.ram };
        let multiboot_info = self.place_information(&info, free).map_err(|problem| problem.with(path))?;
        Ok(Entry::Protected { eip: self.entry, multiboot_info })
    }

    /// Writes the information structure and returns its address. The structure is below 1 MiB, where kernels do not
    /// allocate memory. It is at `free`, above everything else, if the image occupies that memory or the command line
    /// is too long for it.
    fn place_information(&self, info: &Information, free: u64) -> Result<u32, Problem> {
        let len = info.bytes(0).len() as u64;
        let low_end = low::MULTIBOOT_INFO + len;
        let overlaps = |s: &Segment| s.memory.start < low_end && low::MULTIBOOT_INFO < s.memory.end;
        let fits = low_end <= low::PAGE_TABLES && !self.segments.iter().any(overlaps);
        let at = if fits { low::MULTIBOOT_INFO } else { free };
        let end = at.saturating_add(len);
        let too_large = || segment::too_small("the multiboot information", end, info.ram);
        segment::check_end("the multiboot information", end, info.ram)?;
        let address = u32::try_from(at).map_err(|_| too_large())?;
        info.ram.mapped.write_slice(&info.bytes(address), GuestAddress(at)).map_err(|_| too_large())?;
        Ok(address)
    }
}

/// Reads the address fields of the header (3.1.3), which images that are not ELF need. Returns the only segment and the
/// entry point.
fn read_addresses(header: &Header, head: &[u8], len: u64) -> Result<(Vec<Segment>, u64), Problem> {
    const WRONG: Problem =
        Problem::Damaged("the load addresses in its multiboot header contradict each other");
    let field = |index: usize| u32_at(head, header.offset + 12 + 4 * index).map(u64::from);
    let fields = [field(0), field(1), field(2), field(3), field(4)];
    let [Some(header_addr), Some(load), Some(load_end), Some(bss_end), Some(entry)] = fields else {
        return Err(Problem::Truncated { what: "multiboot header", needs: SEARCHED, has: len });
    };
    let before_header = header_addr.checked_sub(load).ok_or(WRONG)?;
    let start = (header.offset as u64).checked_sub(before_header).ok_or(WRONG)?;
    // "If this field is zero, the boot loader assumes that the text and data segments occupy the whole OS image file."
    let file_len =
        if load_end == 0 { len.checked_sub(start) } else { load_end.checked_sub(load) }.ok_or(WRONG)?;
    check_in_file("image", start + file_len, len)?;
    // "If this field is zero, the boot loader assumes that no bss segment is present."
    let memory_len = if bss_end == 0 { Some(file_len) } else { bss_end.checked_sub(load) };
    let memory_len = memory_len.filter(|memory| *memory >= file_len).ok_or(WRONG)?;
    let offset = |at| usize::try_from(at).map_err(|_| WRONG);
    let segment = Segment {
        memory: load..load + memory_len,
        file: offset(start)?..offset(start + file_len)?,
        virtual_address: load,
    };
    Ok((vec![segment], entry))
}

/// Splits a list of modules, `FILE ARGS,FILE ARGS`, which has the syntax of QEMU's `-initrd`. A doubled comma is a
/// comma in a name.
fn split_modules(list: &Path) -> Vec<Vec<u8>> {
    let mut modules = vec![Vec::new()];
    let mut bytes = list.as_os_str().as_bytes().iter().copied().peekable();
    while let Some(byte) = bytes.next() {
        if byte == b',' && bytes.next_if_eq(&b',').is_none() {
            modules.push(Vec::new());
        } else if let Some(module) = modules.last_mut() {
            module.push(byte);
        }
    }
    modules
        .iter()
        .map(|module| module.trim_ascii_start().to_vec())
        .filter(|module| !module.is_empty())
        .collect()
}

/// Returns the kernel's command line. Its first word is the path of the kernel's file.
fn command_line(path: &Path, append: &str) -> Vec<u8> {
    let mut line = path.as_os_str().as_bytes().to_vec();
    line.push(b' ');
    line.extend_from_slice(append.as_bytes());
    line
}

struct Module {
    start: u32,
    end: u32,
    /// Path of the file, and the arguments.
    text: Vec<u8>,
}

impl Module {
    fn place(text: Vec<u8>, at: u64, ram: &GuestRam) -> Result<Self, LoadError> {
        let name = text.split(|byte| *byte == b' ').next().unwrap_or_default();
        let file = UserFile::open(Path::new(OsStr::from_bytes(name)))?;
        let end = at.saturating_add(file.len);
        segment::check_end("the module", end, ram).map_err(|problem| file.error(problem))?;
        let address =
            |at| u32::try_from(at).map_err(|_| file.error(segment::too_small("the module", end, ram)));
        let (start, end) = (address(at)?, address(end)?);
        file.place(ram, at)?;
        Ok(Self { start, end, text })
    }
}

/// Contents of the information structure (3.3).
struct Information<'a> {
    command_line: Vec<u8>,
    modules: Vec<Module>,
    ram: &'a GuestRam,
}

impl Information<'_> {
    /// Length up to the VBE fields, which are not present.
    const LEN: usize = 88;
    const HAS_MEMORY: u32 = 1 << 0;
    const HAS_COMMAND_LINE: u32 = 1 << 2;
    const HAS_MODULES: u32 = 1 << 3;
    const HAS_MAP: u32 = 1 << 6;
    const HAS_LOADER_NAME: u32 = 1 << 9;

    /// Returns the bytes of the structure and of the data that it points to, for the address `base`.
    fn bytes(&self, base: u32) -> Vec<u8> {
        let mut block = Block { base, bytes: vec![0; Self::LEN] };
        let map = memory::map(self.ram.size());
        let first_kib = map.first().map_or(0, |range| range.len) >> 10;
        let upper_kib = memory::low_end(self.ram.size()).saturating_sub(HIGH_RAM) >> 10;

        let texts: Vec<u32> = self.modules.iter().map(|module| block.text(&module.text)).collect();
        let command_line = block.text(&self.command_line);
        let loader_name = block.text(b"tally");
        block.align();
        let modules = block.end();
        for (module, text) in self.modules.iter().zip(texts) {
            block.words(&[module.start, module.end, text, 0]);
        }
        let memory = block.end();
        for range in &map {
            let kind = match range.kind {
                RangeKind::Ram => 1,
                RangeKind::Reserved => 2,
            };
            // "The 'size' value ... is the size of the associated structure in bytes", without itself.
            block.words(&[20, low_word(range.start), high_word(range.start)]);
            block.words(&[low_word(range.len), high_word(range.len), kind]);
        }
        let memory_len = block.end() - memory;

        let flags = Self::HAS_MEMORY
            | Self::HAS_COMMAND_LINE
            | Self::HAS_MODULES
            | Self::HAS_MAP
            | Self::HAS_LOADER_NAME;
        for (at, value) in [
            (0, flags),
            (4, low_word(first_kib)),
            (8, low_word(upper_kib)),
            (16, command_line),
            (20, count(&self.modules)),
            (24, modules),
            (44, memory_len),
            (48, memory),
            (64, loader_name),
        ] {
            block.bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        }
        block.bytes
    }
}

/// Bytes that will be written at the address `base`.
struct Block {
    base: u32,
    bytes: Vec<u8>,
}

impl Block {
    fn end(&self) -> u32 {
        self.base.saturating_add(count(&self.bytes))
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(8), 0);
    }

    fn text(&mut self, text: &[u8]) -> u32 {
        let at = self.end();
        self.bytes.extend_from_slice(text);
        self.bytes.push(0);
        at
    }

    fn words(&mut self, words: &[u32]) {
        self.bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    }
}

fn count<T>(items: &[T]) -> u32 {
    u32::try_from(items.len()).unwrap_or(u32::MAX)
}

fn low_word(value: u64) -> u32 {
    u32::try_from(value & 0xffff_ffff).unwrap_or(u32::MAX)
}

fn high_word(value: u64) -> u32 {
    low_word(value >> 32)
}

#[cfg(test)]
mod tests;
