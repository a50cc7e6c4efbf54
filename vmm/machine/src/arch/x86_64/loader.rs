//! The kernels that boot on this processor: Linux as a bzImage or a vmlinux, and multiboot images.

mod bzimage;
mod elf;
mod linux;
mod multiboot;
pub mod retarget;
mod sections;
mod segment;
pub mod shared_page;
mod sysret;

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

use std::io::{Cursor, Read, Seek};
use std::path::Path;

use self::linux::Linux;
use self::multiboot::Multiboot;
use self::sections::Sections;
use crate::loader::error::{LoadError, Problem};
use crate::loader::file::read_range;
use crate::loader::foreign;
use crate::loader::kernel::{self, Boot};

/// What this architecture is called.
const NAME: &str = "x86-64";

/// Says that a file is for other processors.
fn built_for(built: &'static str) -> Problem {
    Problem::Architecture { built, host: NAME }
}

/// What can be booted, for whoever brings something else.
pub const FORMATS: &str = "neither a bzImage, nor a vmlinux, nor a multiboot image";

/// A kernel for this architecture.
pub type Kernel = kernel::Kernel<Format>;

/// What a kernel's file is.
pub struct Format {
    kind: Kind,
    /// What an ELF file says about its parts, most of it from behind its segments.
    sections: Sections,
}

enum Kind {
    Linux(Linux),
    Multiboot(Multiboot),
}

/// How the guest's first CPU starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// In 64-bit mode, with identity-mapped pages (Linux/x86 boot protocol, "64-bit Boot Protocol").
    Long {
        /// The first instruction.
        rip: u64,
        /// What RSI points to.
        boot_params: u64,
    },
    /// In 32-bit protected mode without paging (multiboot specification, 3.2, "Machine state").
    Protected {
        /// The first instruction.
        eip: u32,
        /// What EBX points to.
        multiboot_info: u32,
    },
}

impl Entry {
    /// What EAX says to an image that starts in protected mode.
    pub const MULTIBOOT_MAGIC: u32 = 0x2bad_b002;
}

impl Format {
    /// Finds out what a file is. It comes with the ELF file as far as its segments reach, unpacked, or the whole of a multiboot
    /// image that is not ELF.
    pub fn read(file: &mut (impl Read + Seek), len: u64) -> Result<(Self, Vec<u8>), Problem> {
        let (kind, image) = classify(file, len)?;
        // A packed kernel has its own inside.
        let packed = || Sections::read(&mut Cursor::new(&image), image.len() as u64);
        let sections = Sections::read(file, len).or_else(packed).unwrap_or_default();
        Ok((Self { kind, sections }, image))
    }

    /// Whether it is Linux, and not a multiboot image.
    pub fn is_linux(&self) -> bool {
        matches!(self.kind, Kind::Linux(_))
    }

    /// Puts the kernel and what it is booted with into the guest's memory.
    pub fn load(&self, path: &Path, image: &[u8], boot: &Boot) -> Result<Entry, LoadError> {
        match &self.kind {
            Kind::Linux(linux) => linux.load(path, image, boot),
            Kind::Multiboot(multiboot) => multiboot.load(path, image, boot),
        }
    }
}

/// Multiboot goes first: its images are often ELF files too, and say by their header how they want to be started.
fn classify(file: &mut (impl Read + Seek), len: u64) -> Result<(Kind, Vec<u8>), Problem> {
    let head = read_range(file, 0..len.min(multiboot::SEARCHED))?;
    if let Some(header) = multiboot::Header::find(&head) {
        let (multiboot, image) = Multiboot::read(&header, &head, file, len)?;
        return Ok((Kind::Multiboot(multiboot), image));
    }
    let (linux, image) = if elf::is_elf(&head) {
        Linux::read_vmlinux(file, len)?
    } else if bzimage::is_bzimage(&head) {
        Linux::read_bzimage(file, len)?
    } else {
        return Err(foreign::architecture(&head).map_or(Problem::NotAKernel(FORMATS), built_for));
    };
    Ok((Kind::Linux(linux), image))
}
