//! The programs that simulate processors: one for each kind of host.

mod packaged;
mod patched;

use std::path::PathBuf;
use std::process::Command;

use guest_images::cache::Cache;
use guest_images::{Arch, Progress};

use crate::Result;

pub use patched::was_built;

/// The program that simulates a processor.
#[derive(Debug, Clone)]
pub struct LabCpu {
    /// The QEMU.
    pub program: PathBuf,
    /// The folder of its firmware.
    pub firmware: PathBuf,
    /// The root of the packages that it is from, if it needs their libraries in place of this machine's.
    root: Option<PathBuf>,
}

impl LabCpu {
    /// Runs it.
    pub fn command(&self) -> Command {
        match &self.root {
            None => Command::new(&self.program),
            Some(root) => packaged::command(root, &self.program),
        }
    }
}

/// The processor of a kind of host, built if it has not been.
pub fn build(cache: &Cache, arch: Arch, progress: &mut Progress) -> Result<LabCpu> {
    match arch {
        Arch::X86_64 => patched::build(cache, progress),
        Arch::Riscv64 => packaged::build(cache, progress),
    }
}
