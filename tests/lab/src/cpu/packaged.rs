//! The RISC-V processor: a newer release's QEMU as it is packaged. Its PMU counts instructions exactly, and since version 11
//! its overflow interrupts arrive. It runs with the libraries of its own release.

use std::path::{Path, PathBuf};
use std::process::Command;

use guest_images::cache::{Cache, Key};
use guest_images::packages::Apt;
use guest_images::{Progress, Suite};

use super::LabCpu;
use crate::{Error, Result};

/// The release whose QEMU it is.
const SUITE: Suite = Suite::Sid;
/// QEMU, and what boots the host before Linux does.
const PACKAGES: [&str; 2] = ["qemu-system-riscv", "opensbi"];
const PROGRAM: &str = "usr/bin/qemu-system-riscv64";
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
const LINKER: &str = "ld-linux-x86-64.so.2";
const RECIPE: &str = "1";

pub fn build(cache: &Cache, progress: &mut Progress) -> Result<LabCpu> {
    let key = PACKAGES.iter().fold(Key::new("lab-cpu-riscv64").with(RECIPE).with(SUITE.name()), Key::with);
    let root = cache.entry(&key, progress, |progress, entry| {
        let apt = Apt::open(cache, SUITE, progress)?;
        let mut packages = apt.resolve(&PACKAGES)?;
        let is_wanted = |name: &str| PACKAGES.contains(&name) || name.starts_with("qemu-system-");
        packages.retain(|package| package.is_library() || is_wanted(&package.name));
        apt.unpack(&packages, entry, progress).map_err(Error::from)
    })?;
    Ok(LabCpu { program: root.join(PROGRAM), firmware: root.join("usr/share/qemu"), root: Some(root) })
}

/// Has the program started by its own dynamic linker.
pub fn command(root: &Path, program: &Path) -> Command {
    let libraries: PathBuf = root.join(LIBRARIES);
    let mut command = Command::new(libraries.join(LINKER));
    command.arg("--library-path").arg(&libraries).arg(program);
    // It looks for parts of itself where the package would have installed them: it needs none of those.
    command.env("QEMU_MODULE_DIR", libraries.join("qemu"));
    command
}
