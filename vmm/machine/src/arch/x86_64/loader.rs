//! Loads kernels for x86: Linux as a bzImage or a vmlinux, and multiboot images.

mod added;
mod bzimage;
mod elf;
mod linux;
mod multiboot;
mod rdpmc_in_programs;
mod retarget;
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

use kvm_ioctls::Kvm;
use vpmu::model::intel;

use self::linux::Linux;
use self::multiboot::Multiboot;
use self::sections::Sections;
use super::host::Processor;
use super::memory;
use super::pmu::{Pmu, filter};
use crate::architecture::KernelFacts;
use crate::loader::error::{LoadError, Problem};
use crate::loader::file::read_range;
use crate::loader::foreign;
use crate::loader::kernel::{self, Boot};

pub use self::linux::SavedLinux;

/// Name of the architecture in messages.
const NAME: &str = "x86-64";

/// Returns the error for a file that is built for another architecture.
fn built_for(built: &'static str) -> Problem {
    Problem::Architecture { built, host: NAME }
}

/// Formats of bootable files, for the error message about other files.
pub const FORMATS: &str = "neither a bzImage, nor a vmlinux, nor a multiboot image";

/// A kernel for this architecture.
pub type Kernel = kernel::Kernel<Format>;

/// Format of a kernel's file.
pub struct Format {
    kind: Kind,
    /// Sections and symbols of an ELF file; empty if the file has none.
    sections: Sections,
}

enum Kind {
    Linux(Linux),
    Multiboot(Multiboot),
}

/// State of the guest's first CPU at the kernel's entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// In 64-bit mode with identity-mapped memory (Linux/x86 boot protocol, "64-bit Boot Protocol").
    Long {
        /// Address of the first instruction.
        rip: u64,
        /// Address of the boot parameters ("zero page"), in RSI.
        boot_params: u64,
    },
    /// In 32-bit protected mode without paging (multiboot specification, 3.2, "Machine state").
    Protected {
        /// Address of the first instruction.
        eip: u32,
        /// Address of the multiboot information structure, in EBX.
        multiboot_info: u32,
    },
}

impl Entry {
    /// Value of EAX at the entry of a multiboot image.
    pub const MULTIBOOT_MAGIC: u32 = 0x2bad_b002;
}

impl Format {
    /// Kernels of this architecture are worth keeping as they are when they were patched.
    pub const IS_KEPT: bool = true;

    /// Detects the format of a kernel file of this length. Also returns the unpacked image, which may contain more than
    /// is loaded. For ELF the image ends with the last segment. Offsets in the image are offsets in the file, or in the
    /// vmlinux that a bzImage contains.
    pub fn read(file: &mut (impl Read + Seek), len: u64) -> Result<(Self, Vec<u8>), Problem> {
        let (kind, image) = classify(file, len)?;
        // A bzImage is not ELF, but the vmlinux in it may have sections.
        let packed = || Sections::read(&mut Cursor::new(&image), image.len() as u64);
        let sections = Sections::read(file, len).or_else(packed).unwrap_or_default();
        Ok((Self { kind, sections }, image))
    }

    /// Returns whether a kernel is Linux.
    pub fn is_linux(&self) -> bool {
        matches!(self.kind, Kind::Linux(_))
    }

    /// Returns what the board has to know of the kernel. Must be called after [`Self::retarget`].
    pub fn facts(kernel: &Kernel) -> KernelFacts {
        let pages = kernel.has_shared_pages().then(|| memory::shared_page(0));
        KernelFacts { is_linux: kernel.is_linux(), pages }
    }

    /// Patches the kernel's PMU accesses so that they exit to Tally, and notes or logs the changes.
    pub fn retarget(kernel: &mut Kernel, kvm: &Kvm, pmu: Pmu, cpus: u8) -> Result<(), LoadError> {
        let rdpmc_faults = filter::makes_rdpmc_fault(kvm, Processor::of_this_host().0);
        retarget::retarget(kernel, pmu.page_registers().as_ref(), cpus, rdpmc_faults)
    }

    /// Patches a kernel as [`Self::retarget`] does for the PMU with the most changes, on a host on which all of them
    /// are possible. Needs no KVM: [`crate::untrusted`] calls this.
    pub fn retarget_without_kvm(kernel: &mut Kernel) -> Result<(), LoadError> {
        let shape = intel::Shape { version: intel::Version::V5, general: 8, fixed: 3, absent: 0 };
        retarget::retarget(kernel, shape.page_registers().as_ref(), 2, true)
    }

    /// Returns what to keep of a kernel that was patched. Multiboot images are small, and are not kept.
    pub fn saved(kernel: &Kernel) -> Option<SavedLinux> {
        match &kernel.format.kind {
            Kind::Linux(linux) => Some(linux.saved(kernel.sysret())),
            Kind::Multiboot(_) => None,
        }
    }

    /// Returns the format of a kernel that was kept, or `None` if it cannot be one.
    pub fn restored(saved: SavedLinux) -> Option<Self> {
        Some(Self { kind: Kind::Linux(Linux::restored(saved)?), sections: Sections::default() })
    }

    /// Returns whether programs in the guest can read the counters of an emulated PMU by an instruction. True only
    /// after [`Self::retarget`].
    pub fn lets_programs_read_counters(&self) -> bool {
        matches!(&self.kind, Kind::Linux(linux) if linux.has_rdpmc_in_programs)
    }

    /// Loads a kernel, its initrd and its command line into the guest's memory.
    pub fn load(&self, path: &Path, image: &[u8], boot: &Boot) -> Result<Entry, LoadError> {
        match &self.kind {
            Kind::Linux(linux) => linux.load(path, image, boot),
            Kind::Multiboot(multiboot) => multiboot.load(path, image, boot),
        }
    }
}

/// Detects the format of a file and reads its image. The multiboot header is checked first, because many multiboot
/// images are ELF files too, and their header requires the multiboot entry.
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
