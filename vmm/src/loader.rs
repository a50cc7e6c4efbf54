//! From a kernel file to a guest that is ready to run: what the file is, and where everything goes.
//!
//! A kernel is read once, whole and unpacked, and then loaded. Between the two its code can still be changed, which is
//! why a bzImage is unpacked here and not by the stub that it brings along.

mod bytes;
mod bzimage;
mod elf;
mod error;
mod file;
mod linux;
mod multiboot;
mod retarget;
mod sections;
mod segment;
pub mod slate;
mod sysret;
mod unpack;

#[cfg(test)]
mod testing;

use std::fmt;
use std::io::{Cursor, Read, Seek};
use std::path::{Path, PathBuf};

pub use self::error::LoadError;
pub use self::retarget::Retargeted;

use self::error::Problem;
use self::file::UserFile;
use self::linux::Linux;
use self::multiboot::Multiboot;
use self::sections::Sections;
use crate::memory::GuestRam;

/// The most bytes of a kernel that Tally reads or unpacks.
///
/// Linux maps itself into 512 MiB (`KERNEL_IMAGE_SIZE`) unless it moves itself about; Debian's takes a tenth of that.
const LARGEST: u64 = 512 << 20;

/// A kernel in Tally's memory, unpacked.
pub struct Kernel {
    path: PathBuf,
    /// The ELF file as far as its segments reach, or the whole of a multiboot image that is not ELF.
    image: Vec<u8>,
    /// What an ELF file says about its parts, most of it from behind its segments.
    sections: Sections,
    kind: Kind,
}

enum Kind {
    Linux(Linux),
    Multiboot(Multiboot),
}

/// What a kernel is to be booted with.
pub struct Boot<'a> {
    /// Where to load it: fresh memory, all zeroes, so that nobody need clear a kernel's `.bss`.
    pub ram: &'a GuestRam,
    /// The command line. Multiboot images find the kernel's path in front of it, as the multiboot
    /// specification (3.3, "cmdline") and QEMU have it.
    pub command_line: &'a str,
    /// The initrd. For a multiboot image a list `FILE ARGS,FILE ARGS...` of modules, with `,,` for a comma.
    pub initrd: Option<&'a Path>,
    /// An archive that goes in front of Linux' initrd: the kernel unpacks one after the other.
    pub front: &'a [u8],
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

impl Kernel {
    /// Reads a bzImage, a vmlinux or a multiboot image, whichever the file turns out to be.
    pub fn read(path: &Path) -> Result<Self, LoadError> {
        let mut user = UserFile::open(path)?;
        let (kind, image) = classify(&mut user.file, user.len).map_err(|problem| problem.with(path))?;
        let sections = Sections::read(&mut user.file, user.len);
        Ok(Self::new(path, kind, image, sections))
    }

    /// `sections` are those of the file; a packed kernel has its own inside.
    fn new(path: &Path, kind: Kind, image: Vec<u8>, sections: Option<Sections>) -> Self {
        let packed = || Sections::read(&mut Cursor::new(&image), image.len() as u64);
        let sections = sections.or_else(packed).unwrap_or_default();
        Self { path: path.to_owned(), image, sections, kind }
    }

    /// Puts the kernel and what it is booted with into the guest's memory.
    pub fn load(&self, boot: &Boot) -> Result<Entry, LoadError> {
        match &self.kind {
            Kind::Linux(linux) => linux.load(&self.path, &self.image, boot),
            Kind::Multiboot(multiboot) => multiboot.load(&self.path, &self.image, boot),
        }
    }

    /// Which Linux it is, as `uname -r` says it.
    pub fn release(&self) -> Option<&str> {
        const BANNER: &[u8] = b"Linux version ";
        let at = self.image.windows(BANNER.len()).position(|bytes| bytes == BANNER)? + BANNER.len();
        let release = self.image[at..].split(|&byte| byte == b' ').next()?;
        // It names a folder: what else a file claims is no release.
        let is_name = |byte: &u8| byte.is_ascii_alphanumeric() || b"._+~-".contains(byte);
        let fits = (1..=64).contains(&release.len()) && release[0] != b'.' && release.iter().all(is_name);
        std::str::from_utf8(release).ok().filter(|_| fits)
    }

    /// Whether it is Linux, and not a multiboot image.
    pub fn is_linux(&self) -> bool {
        matches!(self.kind, Kind::Linux(_))
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.is_linux() { "Linux" } else { "a multiboot image" };
        write!(f, "{}, {kind}", self.path.display())
    }
}

impl Drop for Kernel {
    /// Gives back to the host what reading a kernel took: the allocator keeps what the decompressors freed (with xz
    /// 16 MiB), for a need that will not come again.
    fn drop(&mut self) {
        self.image = Vec::new();
        #[cfg(target_env = "gnu")]
        // SAFETY: it takes no pointer, may be called from any thread, and leaves alone what is allocated.
        unsafe {
            libc::malloc_trim(0);
        }
    }
}

/// Multiboot goes first: its images are often ELF files too, and say by their header how they want to be started.
fn classify(file: &mut (impl Read + Seek), len: u64) -> Result<(Kind, Vec<u8>), Problem> {
    let head = file::read_range(file, 0..len.min(multiboot::SEARCHED))?;
    if let Some(header) = multiboot::Header::find(&head) {
        let (multiboot, image) = Multiboot::read(&header, &head, file, len)?;
        return Ok((Kind::Multiboot(multiboot), image));
    }
    let (linux, image) = if elf::is_elf(&head) {
        Linux::read_vmlinux(file, len)?
    } else if bzimage::is_bzimage(&head) {
        Linux::read_bzimage(file, len)?
    } else {
        return Err(foreign_architecture(&head).map_or(Problem::NotAKernel, Problem::Architecture));
    };
    Ok((Kind::Linux(linux), image))
}

/// Other architectures' kernels that are not ELF files: the 64-byte headers of `Documentation/arch/arm64/booting` and
/// `arch/riscv/boot-image-header`, and the PE header of kernels that are EFI programs.
fn foreign_architecture(head: &[u8]) -> Option<&'static str> {
    match head.get(56..60)? {
        b"ARM\x64" => return Some("aarch64"),
        b"RSC\x05" => return Some("RISC-V"),
        _ => {}
    }
    let pe = bytes::u32_at(head, 60)? as usize;
    if !head.starts_with(b"MZ") || head.get(pe..)?.get(..4)? != b"PE\0\0" {
        return None;
    }
    match bytes::u16_at(head, pe.checked_add(4)?)? {
        0xaa64 => Some("aarch64"),
        0x5064 => Some("RISC-V"),
        0x6264 => Some("LoongArch"),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
