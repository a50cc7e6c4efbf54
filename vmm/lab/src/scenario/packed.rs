//! Programs of Debian's packages, with their libraries, as a directory that a guest can change its root to.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use guest_images::cache::{Cache, Key};
use guest_images::packages::Repository;
use guest_images::{Error, Progress, Result, Suite, run_tool};

/// Returns the path of a tar archive of a directory with a package, and makes it first if it is not in the cache.
pub fn archive(package: &str, progress: &mut Progress) -> Result<PathBuf> {
    archive_of(package, &[], Suite::default(), progress)
}

/// Does the same with a package of this release, and with others beside it that it needs and that are not libraries.
pub fn archive_of(package: &str, others: &[&str], suite: Suite, progress: &mut Progress) -> Result<PathBuf> {
    let cache = Cache::open()?;
    let repository = Repository::open(&cache, suite, progress)?;
    let mut packages = repository.resolve(&[&[package], others].concat())?;
    packages
        .retain(|other| other.name == package || others.contains(&other.name.as_str()) || other.is_library());
    let key = packages.iter().fold(Key::new(package), |key, package| key.with(&package.file));
    let name = format!("{package}.tar");
    let entry = cache.entry(&key, progress, |progress, entry| {
        let root = entry.join("root");
        for folder in ["proc", "dev", "sys", "tmp"] {
            fs::create_dir_all(root.join(folder)).map_err(Error::io("create", root.join(folder)))?;
        }
        repository.unpack(&packages, &root, progress)?;
        let doc = root.join("usr/share");
        fs::remove_dir_all(&doc).map_err(Error::io("remove", doc))?;
        pack(&root, &entry.join(&name))?;
        fs::remove_dir_all(&root).map_err(Error::io("remove", root))
    })?;
    Ok(entry.join(name))
}

/// Packs a directory so that the archive says nothing of this machine and this time.
fn pack(root: &Path, archive: &Path) -> Result<()> {
    let mut tar = Command::new("tar");
    tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0", "-C"]).arg(root);
    run_tool(tar.arg("-cf").arg(archive).arg("."), "tar").map(drop)
}
