//! Loads and patches the kernels that boot on RISC-V: Linux' `Image` (see [`image`]).

use std::io::{Read, Seek};
use std::ops::Range;
use std::path::Path;

use kvm_ioctls::Kvm;
use log::{debug, info, warn};
use serde::{Deserialize, Serialize};
use vm_memory::{Bytes, GuestAddress};
use vpmu::sbi_page::Page;
use vpmu_retarget::riscv::{Refusal, Retargeted};

use super::memory::{RAM, device_tree};
use super::pmu::Pmu;
use crate::architecture::KernelFacts;
use crate::loader::error::{LoadError, Problem};
use crate::loader::file::UserFile;
use crate::loader::image::{self, Place};
use crate::loader::kernel::{self, Boot};
use crate::memory::GuestRam;
use crate::target::COUNTERS;

/// `COMMAND_LINE_SIZE` of RISC-V, including the terminating NUL.
const COMMAND_LINE_SIZE: usize = 1024;
/// Alignment of kernels, which is a large page.
const ALIGNMENT: u64 = 2 << 20;
/// Alignment of initrds.
const PAGE: u64 = 4096;
/// Size of the table that Linux allocates for all memory that there could ever be, however much there is: 2^56 bytes in
/// sections of 2^27, with 8 bytes for 128 sections.
const TABLES: u64 = 32 << 20;
/// Name of the function that allocates the table (`mm/sparse.c`). Kernels that have such a table contain the name.
const MAKES_TABLES: &[u8] = b"\0memblocks_present\0";

/// A kernel for this architecture.
pub type Kernel = kernel::Kernel<Format>;

/// Format of a kernel file.
pub struct Format {
    place: Place,
    /// Offset of the pages from the beginning of the kernel, and their end, if the kernel uses shared pages.
    pages: Option<Range<u64>>,
}

impl Format {
    /// Returns the address of the first vCPU's shared page, if the kernel uses such pages.
    pub fn pages(&self) -> Option<u64> {
        self.pages.as_ref().map(|pages| self.begin().saturating_add(pages.start))
    }

    /// Returns the address of the kernel.
    fn begin(&self) -> u64 {
        RAM.saturating_add(self.place.offset)
    }

    fn patch(kernel: &mut Kernel, cpus: u8) -> Result<Retargeted, Refusal> {
        let retargeted = vpmu_retarget::riscv::retarget(&mut kernel.image, cpus)?;
        let len = u64::from(cpus) * Page::STRIDE as u64;
        kernel.format.pages = retargeted.pages.map(|start| start..start.saturating_add(len));
        Ok(retargeted)
    }
}

/// What is kept of kernels: nothing, as they are unpacked and patched fast.
#[derive(Debug, Serialize, Deserialize)]
pub enum Nothing {}

/// Initial state of the guest's first vCPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Address of the first instruction.
    pub pc: u64,
    /// Address and length of the initrd. The length is 0 if there is none.
    pub initrd: (u64, u64),
}

impl Format {
    /// Kernels of this architecture are worth keeping as they are when they were patched.
    pub const IS_KEPT: bool = false;

    /// Detects the format of a kernel file of this length. Also returns the unpacked image, which may contain more than
    /// is loaded.
    pub fn read(file: &mut (impl Read + Seek), len: u64) -> Result<(Self, Vec<u8>), Problem> {
        let (place, image) = image::read(file, len)?;
        Ok((Self { place, pages: None }, image))
    }

    /// Returns true: only Linux is supported.
    pub fn is_linux(&self) -> bool {
        true
    }

    /// Returns what to keep of a kernel that was patched, or `None` if such kernels are not kept.
    pub fn saved(_kernel: &Kernel) -> Option<Nothing> {
        None
    }

    /// Returns the format of a kernel that was kept, or `None` if it cannot be one.
    pub fn restored(saved: Nothing) -> Option<Self> {
        match saved {}
    }

    /// Returns what the board has to know of the kernel. Must be called after [`Self::retarget`].
    pub fn facts(kernel: &Kernel) -> KernelFacts {
        KernelFacts { is_linux: true, pages: kernel.format.pages() }
    }

    /// Patches the kernel's PMU accesses so that they become calls to Tally, and logs the changes. For a guest without
    /// a PMU, a kernel that cannot be patched is left as it is.
    pub fn retarget(kernel: &mut Kernel, _kvm: &Kvm, pmu: Pmu, cpus: u8) -> Result<(), LoadError> {
        let retargeted = match Self::patch(kernel, cpus) {
            Ok(retargeted) => retargeted,
            Err(refusal) if pmu == Pmu::None => {
                debug!("{refusal}: it is left as it is");
                return Ok(());
            }
            Err(refusal) => return Err(Problem::Retarget(refusal.to_string()).with(&kernel.path)),
        };
        for change in &retargeted.changes {
            info!(target: COUNTERS, "{change}");
        }
        if pmu != Pmu::None && !retargeted.samples() {
            warn!(target: COUNTERS, "this kernel was built without Sscofpmf: it can count, but not sample");
        }
        Ok(())
    }

    /// Patches a kernel as [`Self::retarget`] does for the PMU with the most changes, on a host on which all of them
    /// are possible. Needs no KVM: [`crate::untrusted`] calls this.
    pub fn retarget_without_kvm(kernel: &mut Kernel) -> Result<(), LoadError> {
        Self::patch(kernel, 2)
            .map(drop)
            .map_err(|refusal| Problem::Retarget(refusal.to_string()).with(&kernel.path))
    }

    /// Returns false: KVM reads `cycle` and `instret` of a program as 0 and tells nobody.
    pub fn lets_programs_read_counters(&self) -> bool {
        false
    }

    /// Loads a kernel and its initrd into the guest's memory.
    pub fn load(&self, path: &Path, image: &[u8], boot: &Boot) -> Result<Entry, LoadError> {
        let (tree, _) = device_tree(boot.ram.size());
        let pc = self.begin();
        let pages = self.pages.as_ref().map_or(0, |pages| pages.end);
        let end = pc.saturating_add(self.place.len.max(pages));
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
        let initrd = boot.initrd.map(UserFile::open).transpose()?;
        let initrd_len =
            initrd.as_ref().map_or(0, |file| file.len.saturating_add(boot.initrd_prefix.len() as u64));
        // The initrd counts twice, because Linux unpacks it while the archive is still in memory.
        let needs = end.saturating_add(TABLES).saturating_add(initrd_len.saturating_mul(2));
        // Check this here: if Linux runs out of memory this early, it has not parsed `panic=` yet and would hang
        // forever.
        if needs > tree && contains(image, MAKES_TABLES) {
            let needs = size_with_end(needs, boot.ram);
            return Err(Problem::Beginning { needs, has: boot.ram.size() }.with(path));
        }
        // Do not write zeroes at the end: guest memory is zeroed, and unwritten pages cost the host nothing.
        let used = image.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        write(boot.ram, &image[..used], pc).map_err(|problem| problem.with(path))?;
        let initrd = match initrd {
            Some(file) => place_initrd(file, initrd_len, boot, end, tree)?,
            None => (0, 0),
        };
        Ok(Entry { pc, initrd })
    }
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

/// Loads the initrd as high as possible below `limit`. Returns its address and length.
fn place_initrd(
    file: UserFile,
    len: u64,
    boot: &Boot,
    kernel_end: u64,
    limit: u64,
) -> Result<(u64, u64), LoadError> {
    let at = limit.saturating_sub(len) / PAGE * PAGE;
    if at < kernel_end {
        let end = kernel_end.saturating_add(len).saturating_add(PAGE);
        return Err(file.error(too_small("the initrd", end, boot.ram)));
    }
    write(boot.ram, boot.initrd_prefix, at).map_err(|problem| file.error(problem))?;
    file.place(boot.ram, at + boot.initrd_prefix.len() as u64)?;
    Ok((at, len))
}

fn write(ram: &GuestRam, bytes: &[u8], at: u64) -> Result<(), Problem> {
    let end = at.saturating_add(bytes.len() as u64);
    ram.mapped.write_slice(bytes, GuestAddress(at)).map_err(|_| too_small("the kernel", end, ram))
}

/// Returns an error for a file that would end at this address.
fn too_small(what: &'static str, end: u64, ram: &GuestRam) -> Problem {
    Problem::Memory { what, needs: size_with_end(end, ram), has: ram.size() }
}

/// Returns the size of RAM with which a file that ends at this address fits.
fn size_with_end(end: u64, ram: &GuestRam) -> u64 {
    let (tree, _) = device_tree(ram.size());
    let reserved = RAM + ram.size() - tree;
    end.saturating_sub(RAM).saturating_add(reserved)
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    fn image(len: usize) -> Vec<u8> {
        let mut image = vec![0x13; len];
        image[8..16].copy_from_slice(&0x20_0000_u64.to_le_bytes());
        image[16..24].copy_from_slice(&(len as u64 + 4096).to_le_bytes());
        image[56..60].copy_from_slice(b"RSC\x05");
        image
    }

    #[test]
    fn a_guest_in_which_linux_would_hang_early_is_refused() {
        let room = |size: &str, kernel: &[u8]| {
            let ram = GuestRam::new(&size.parse().unwrap(), crate::arch::riscv64::memory::ranges).unwrap();
            let boot = Boot { ram: &ram, command_line: "", initrd: None, initrd_prefix: &[] };
            let (format, image) = Format::read(&mut Cursor::new(kernel), kernel.len() as u64).unwrap();
            format.load(Path::new("kernel"), &image, &boot).map(|entry| entry.pc)
        };
        let small = image(8192);
        let mut sparse = small.clone();
        sparse[4096..][..MAKES_TABLES.len()].copy_from_slice(MAKES_TABLES);
        // 2 MiB in front of the kernel, its 12 KiB, the tables, and the space for the device tree.
        let text = room("34M", &sparse).unwrap_err().to_string();
        assert!(text.contains("--memory 35M or more, the guest has 34M"), "{text}");
        for (size, kernel) in [("35M", &sparse), ("34M", &small)] {
            assert_eq!(room(size, kernel).unwrap(), RAM + (2 << 20));
        }
    }
}
