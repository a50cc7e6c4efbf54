//! Runs programs that are for another kind of processor, as far as building an image takes it: one says what it loads,
//! another what commands it has.

use std::fs;
use std::path::PathBuf;

use crate::cache::{Cache, Key};
use crate::packages::Apt;
use crate::release::{Arch, Suite};
use crate::{Error, Progress, Result};

const PACKAGE: &str = "qemu-user-static";

/// The program that runs those of this kind of processor, if this machine cannot by itself.
pub fn emulator(cache: &Cache, arch: Arch, progress: &mut Progress) -> Result<Option<PathBuf>> {
    if arch == Arch::default() {
        return Ok(None);
    }
    let (suite, program) = (Suite::default(), format!("qemu-{arch}-static"));
    let key = Key::new(&format!("emulator-{arch}")).with(PACKAGE).with(suite.name());
    let entry = cache.entry(&key, progress, |progress, entry| {
        let apt = Apt::open(cache, suite, progress)?;
        let mut packages = apt.resolve(&[PACKAGE])?;
        packages.retain(|package| package.name == PACKAGE);
        let unpacked = entry.join("unpacked");
        apt.unpack(&packages, &unpacked, progress)?;
        // The package has one for every kind of processor.
        let from = unpacked.join("usr/bin").join(&program);
        fs::rename(&from, entry.join(&program)).map_err(Error::io("find", from))?;
        fs::remove_dir_all(&unpacked).map_err(Error::io("remove", unpacked))
    })?;
    Ok(Some(entry.join(program)))
}
