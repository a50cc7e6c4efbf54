//! Runs programs of another architecture with QEMU's user mode emulation. Building an image runs two of them: the
//! dynamic linker to list a program's libraries, and busybox to list its commands.

use std::fs;
use std::path::PathBuf;

use crate::cache::{Cache, Key};
use crate::error::{Error, Result};
use crate::packages::Apt;
use crate::progress::Progress;
use crate::release::{Arch, Suite};

const PACKAGE: &str = "qemu-user-static";

/// Returns the emulator for an architecture, or `None` if this machine runs its programs natively.
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
        // The package contains emulators for all architectures.
        let from = unpacked.join("usr/bin").join(&program);
        fs::rename(&from, entry.join(&program)).map_err(Error::io("find", from))?;
        fs::remove_dir_all(&unpacked).map_err(Error::io("remove", unpacked))
    })?;
    Ok(Some(entry.join(program)))
}
