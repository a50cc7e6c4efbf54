//! Reads, patches and loads kernels for this architecture.

use std::fmt;
use std::path::Path;

use kvm_ioctls::Kvm;

use crate::arch;
use crate::architecture::{EntryOf, Format, KernelFacts};
use crate::loader::error::LoadError;
use crate::loader::file::UserFile;
use crate::loader::kernel::{self, Boot};
use crate::pmu::Pmu;

/// A kernel for this architecture.
pub type Kernel = kernel::Kernel<arch::Format>;

impl Kernel {
    /// Reads a kernel from a file and detects its format.
    pub fn read(path: &Path) -> Result<Self, LoadError> {
        let mut user = UserFile::open(path)?;
        let (format, image) =
            arch::Format::read(&mut user.file, user.len).map_err(|problem| problem.with(path))?;
        Ok(Self { path: path.to_owned(), image, format })
    }

    /// Patches the kernel's PMU accesses so that they exit to Tally, and logs the changes.
    pub fn retarget(&mut self, kvm: &Kvm, pmu: Pmu, cpus: u8) -> Result<(), LoadError> {
        arch::Format::retarget(self, kvm, pmu, cpus)
    }

    /// Loads the kernel and its initrd into the guest's memory, on x86 also the command line.
    pub fn load(&self, boot: &Boot) -> Result<EntryOf<arch::Format>, LoadError> {
        self.format.load(&self.path, &self.image, boot)
    }

    /// Returns whether programs in the guest can read the counters of an emulated PMU by an instruction.
    pub fn lets_programs_read_counters(&self) -> bool {
        self.format.lets_programs_read_counters()
    }

    /// Returns what the board has to know of the kernel.
    pub(crate) fn facts(&self) -> KernelFacts {
        arch::Format::facts(self)
    }

    /// Returns true if the kernel is Linux.
    pub fn is_linux(&self) -> bool {
        self.format.is_linux()
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.is_linux() { "Linux" } else { "a multiboot image" };
        write!(f, "{}, {kind}", self.path.display())
    }
}
