//! Reads, patches and loads kernels for this architecture.

use std::fmt;
use std::path::Path;

use kvm_ioctls::Kvm;
use log::info;
use serde::{Deserialize, Serialize};

use crate::arch::{Entry, Format, SavedFormat};
use crate::architecture::KernelFacts;
use crate::loader::error::LoadError;
use crate::loader::file::UserFile;
use crate::loader::kernel::Boot;
use crate::pmu::Pmu;
use crate::target::COUNTERS;

pub use crate::arch::Kernel;

/// A kernel that was read and patched, without its image.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedKernel {
    format: SavedFormat,
    release: Option<String>,
    changes: Vec<String>,
}

impl Kernel {
    /// Kernels are worth keeping as they are when they were patched.
    pub const IS_KEPT: bool = Format::IS_KEPT;

    /// Reads a kernel from a file and detects its format.
    pub fn read(path: &Path) -> Result<Self, LoadError> {
        let mut user = UserFile::open(path)?;
        let (format, image) = Format::read(&mut user.file, user.len).map_err(|problem| problem.with(path))?;
        Ok(Self::new(path, image, format))
    }

    /// Patches the kernel's PMU accesses so that they exit to Tally.
    pub fn retarget(&mut self, kvm: &Kvm, pmu: Pmu, cpus: u8) -> Result<(), LoadError> {
        Format::retarget(self, kvm, pmu, cpus)
    }

    /// Logs what was changed in the kernel.
    pub fn log_changes(&self) {
        for change in &self.changes {
            info!(target: COUNTERS, "{change}");
        }
    }

    /// Returns what [`Self::restored`] needs beside the image, or `None` if kernels of this format are not saved.
    pub fn saved(&self) -> Option<SavedKernel> {
        let format = Format::saved(self)?;
        let release = self.release().map(str::to_owned);
        Some(SavedKernel { format, release, changes: self.changes.clone() })
    }

    /// Returns a kernel that was saved after it had been patched.
    pub fn restored(path: &Path, image: Vec<u8>, saved: SavedKernel) -> Option<Self> {
        let SavedKernel { format, release, changes } = saved;
        let mut kernel = Self::new(path, image, Format::restored(format)?);
        (kernel.release, kernel.changes) = (release.into(), changes);
        Some(kernel)
    }

    /// Returns the image, as it is loaded.
    pub fn image(&self) -> &[u8] {
        &self.image
    }

    /// Loads the kernel and its initrd into the guest's memory, on x86 also the command line.
    pub fn load(&self, boot: &Boot) -> Result<Entry, LoadError> {
        self.format.load(&self.path, &self.image, boot)
    }

    /// Returns whether programs in the guest can read the counters of an emulated PMU by an instruction.
    pub fn lets_programs_read_counters(&self) -> bool {
        self.format.lets_programs_read_counters()
    }

    /// Returns what the board has to know of the kernel.
    pub(crate) fn facts(&self) -> KernelFacts {
        Format::facts(self)
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
