//! The kernels that boot on this processor: Linux' `Image`, as it is, packed by gzip, or packed as an EFI program
//! (`Documentation/arch/riscv/boot-image-header`, `boot`).

use std::io::{Read, Seek};
use std::path::Path;

use log::{debug, info, warn};
use vm_memory::{Bytes, GuestAddress};

use super::memory::{RAM, device_tree};
use crate::loader::bytes::{u16_at, u32_at, u64_at};
use crate::loader::error::{LoadError, Problem};
use crate::loader::file::{UserFile, read_range};
use crate::loader::unpack::unpack;
use crate::loader::{Boot, Kernel, foreign};
use crate::logging::COUNTERS;
use crate::memory::GuestRam;
use crate::pmu::Pmu;

/// What can be booted, for whoever brings something else.
pub const FORMATS: &str = "no Linux Image, packed or not";

const MAGIC: &[u8] = b"RSC\x05";
const GZIP: &[u8] = &[0x1f, 0x8b];
/// "MZ", and behind two bytes "zimg": a program that unpacks a kernel.
const PACKED: &[u8] = b"zimg";
/// `COMMAND_LINE_SIZE` of RISC-V, with the NUL at its end.
const COMMAND_LINE_SIZE: usize = 1024;
/// Kernels are placed at multiples of this, which is a large page.
const ALIGNMENT: u64 = 2 << 20;
/// And initrds of this.
const PAGE: u64 = 4096;

/// What a kernel's file is.
pub struct Format {
    /// How far behind RAM's beginning it is to be.
    offset: u64,
    /// How much memory it takes.
    len: u64,
}

/// How the guest's first CPU starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The first instruction.
    pub pc: u64,
    /// Where the initrd is, and how long; 0 if there is none.
    pub initrd: (u64, u64),
}

impl Format {
    /// Finds out what a file is. It comes with the kernel, unpacked.
    pub fn read(file: &mut (impl Read + Seek), len: u64) -> Result<(Self, Vec<u8>), Problem> {
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
        // A kernel that does not say how large it is takes what it has.
        let len = number(16)?.max(image.len() as u64);
        Ok((Self { offset: number(8)?, len }, image))
    }

    /// Whether it is Linux: nothing else boots.
    pub fn is_linux(&self) -> bool {
        true
    }

    /// Puts the kernel and what it is booted with into the guest's memory.
    pub fn load(&self, path: &Path, image: &[u8], boot: &Boot) -> Result<Entry, LoadError> {
        let (tree, _) = device_tree(boot.ram.size());
        let pc = RAM.saturating_add(self.offset);
        let end = pc.saturating_add(self.len);
        if end > tree {
            return Err(too_small("the kernel", end, boot.ram).with(path));
        }
        if !pc.is_multiple_of(ALIGNMENT) {
            return Err(Problem::Damaged("it wants to be at an address that no kernel can have").with(path));
        }
        let len = boot.command_line.len();
        if len >= COMMAND_LINE_SIZE {
            return Err(Problem::CommandLine { len, max: COMMAND_LINE_SIZE - 1 }.with(path));
        }
        // Memory is zero to begin with, and what nobody wrote costs the host nothing.
        let used = image.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        write(boot.ram, &image[..used], pc).map_err(|problem| problem.with(path))?;
        let initrd = match boot.initrd {
            Some(initrd) => place_initrd(initrd, boot, end, tree)?,
            None => (0, 0),
        };
        Ok(Entry { pc, initrd })
    }
}

/// As high as it goes.
fn place_initrd(path: &Path, boot: &Boot, kernel_end: u64, limit: u64) -> Result<(u64, u64), LoadError> {
    let file = UserFile::open(path)?;
    let front = boot.front.len() as u64;
    let len = file.len.saturating_add(front);
    let at = limit.saturating_sub(len) / PAGE * PAGE;
    if at < kernel_end {
        let end = kernel_end.saturating_add(len).saturating_add(PAGE);
        return Err(file.error(too_small("the initrd", end, boot.ram)));
    }
    write(boot.ram, boot.front, at).map_err(|problem| file.error(problem))?;
    file.place(boot.ram, at + front)?;
    Ok((at, len))
}

fn write(ram: &GuestRam, bytes: &[u8], at: u64) -> Result<(), Problem> {
    let end = at.saturating_add(bytes.len() as u64);
    ram.mapped.write_slice(bytes, GuestAddress(at)).map_err(|_| too_small("the kernel", end, ram))
}

/// What to say of something that would end there.
fn too_small(what: &'static str, end: u64, ram: &GuestRam) -> Problem {
    let (tree, _) = device_tree(ram.size());
    let behind = RAM + ram.size() - tree;
    Problem::Memory { what, needs: end.saturating_sub(RAM).saturating_add(behind), has: ram.size() }
}

fn is_image(head: &[u8]) -> bool {
    head.get(56..60) == Some(MAGIC)
}

/// The kernel in a program that unpacks it (`drivers/firmware/efi/libstub/zboot-header.S`).
fn unpacked(file: &mut (impl Read + Seek), head: &[u8], len: u64) -> Result<Vec<u8>, Problem> {
    const SHORT: Problem = Problem::Damaged("it is shorter than its header");
    let number = |at| u32_at(head, at).map(u64::from).ok_or(SHORT);
    let (start, size) = (number(8)?, number(12)?);
    // What gzip packs ends with its size; behind what others do the kernel's build has put it.
    let behind = if head.get(24..28) == Some(b"gzip") { 0 } else { 4 };
    let end = start + size + behind;
    if end > len {
        return Err(Problem::Truncated { what: "packed kernel", needs: end, has: len });
    }
    unpack(file, start..end, u64::MAX)
}

/// Why a file is none of those.
fn wrong(head: &[u8]) -> Problem {
    if head.starts_with(b"\x7fELF") {
        return match u16_at(head, 18) {
            Some(machine) if foreign::elf_machine(machine) != super::NAME => {
                Problem::Architecture(foreign::elf_machine(machine))
            }
            _ => Problem::OtherElf("an ELF file, where the kernel's build makes an Image of it"),
        };
    }
    foreign::architecture(head).map_or(Problem::NotAKernel, Problem::Architecture)
}

impl Kernel {
    /// Has the kernel access its PMU in a way that can be handed over, and logs what was changed for that.
    pub fn retarget(&mut self, pmu: Pmu, _cpus: u8) -> Result<(), LoadError> {
        let retargeted = match vpmu::retarget::riscv::retarget(&mut self.image) {
            Ok(retargeted) => retargeted,
            Err(refusal) if pmu == Pmu::None => {
                debug!("{refusal}: it is left as it is");
                return Ok(());
            }
            Err(refusal) => return Err(Problem::Retarget(refusal.to_string()).with(&self.path)),
        };
        for change in &retargeted.changes {
            info!(target: COUNTERS, "{change}");
        }
        if pmu != Pmu::None && !retargeted.samples() {
            warn!(target: COUNTERS, "this kernel was built without Sscofpmf: it can count, but not sample");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    fn image(len: usize) -> Vec<u8> {
        let mut image = vec![0x13; len];
        image[8..16].copy_from_slice(&0x20_0000_u64.to_le_bytes());
        image[16..24].copy_from_slice(&(len as u64 + 4096).to_le_bytes());
        image[56..60].copy_from_slice(MAGIC);
        image
    }

    fn read(file: &[u8]) -> Result<(Format, Vec<u8>), Problem> {
        Format::read(&mut Cursor::new(file), file.len() as u64)
    }

    #[test]
    fn an_image_is_read_whole() {
        let (format, content) = read(&image(8192)).unwrap();
        assert_eq!((format.offset, format.len, content.len()), (0x20_0000, 12288, 8192));
    }

    #[test]
    fn other_processors_kernels_are_named() {
        let mut bzimage = vec![0; 4096];
        bzimage[0x202..0x206].copy_from_slice(b"HdrS");
        let text = read(&bzimage).err().unwrap().to_string();
        assert_eq!(text, "built for x86-64, this host is RISC-V");
    }
}
