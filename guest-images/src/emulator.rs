//! Runs programs that are for another kind of processor, as far as building an image takes it: one says what it loads,
//! another what commands it has.

use std::path::PathBuf;

use crate::cache::{Cache, Key};
use crate::packages::Apt;
use crate::release::{Arch, Suite};
use crate::{Progress, Result};

const PACKAGE: &str = "qemu-user-static";

/// The program that runs those of this kind of processor, if this machine cannot by itself.
pub fn emulator(cache: &Cache, arch: Arch, progress: &mut Progress) -> Result<Option<PathBuf>> {
    if arch == Arch::default() {
        return Ok(None);
    }
    let key = Key::new(&format!("emulator-{arch}")).with(PACKAGE);
    let program = |entry: PathBuf| entry.join(format!("usr/bin/qemu-{arch}-static"));
    let entry = cache.entry(&key, progress, |progress, entry| {
        let apt = Apt::open(cache, Suite::default(), progress)?;
        let mut packages = apt.resolve(&[PACKAGE])?;
        packages.retain(|package| package.name == PACKAGE);
        apt.unpack(&packages, entry, progress)
    })?;
    Ok(Some(program(entry)))
}
