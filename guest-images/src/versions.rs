//! Versions of what is in the cache.
//!
//! An entry of the cache stays as it is when the distribution gets newer packages, so that a guest's kernel changes
//! only when the user wants it: by removing the entry.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::cache::{Cache, Key};
use crate::error::{Error, Result};
use crate::packages::Package;
use crate::release::Release;

/// Part of the key of a kernel's entry. Must change when what is unpacked of the same package changes.
const RECIPE: &str = "2";
/// File in an entry with the version of the package that it was made from.
const RECORD: &str = "version";

/// An entry of the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheEntry {
    /// The entry's directory.
    pub path: PathBuf,
    /// The version of its package. `None` if an earlier version of Tally made it, which did not record that.
    pub version: Option<String>,
    /// The time at which it was made.
    pub at: SystemTime,
}

impl CacheEntry {
    /// Returns an entry in this directory.
    pub fn at(path: PathBuf) -> Option<Self> {
        let at = fs::metadata(&path).and_then(|entry| entry.modified()).ok()?;
        let version = fs::read_to_string(path.join(RECORD)).ok();
        Some(Self { version: version.map(|version| version.trim().to_owned()), at, path })
    }
}

/// Returns the key of a kernel's entry in the cache.
pub(crate) fn kernel_key(of: Release) -> Key {
    Key::new(&format!("kernel-{}", of.label())).with(RECIPE)
}

/// Returns the kernel of a release in the cache, if it was built.
pub fn built_kernel(cache: &Cache, of: Release) -> Option<CacheEntry> {
    CacheEntry::at(cache.find(&kernel_key(of))?)
}

/// Returns the version of the package of this name.
pub(crate) fn of_package(packages: &[Package], name: &str) -> Option<String> {
    packages.iter().find(|package| package.name == name).map(|package| package.version.clone())
}

/// Records the version of the package from which an entry is made.
pub fn record(entry: &Path, version: Option<String>) -> Result<()> {
    let Some(version) = version else { return Ok(()) };
    let path = entry.join(RECORD);
    fs::write(&path, version).map_err(Error::io("write", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_from_before_versions_were_recorded_has_none() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(CacheEntry::at(folder.path().into()).unwrap().version, None);
        record(folder.path(), Some("6.1.176-1".into())).unwrap();
        assert_eq!(CacheEntry::at(folder.path().into()).unwrap().version.as_deref(), Some("6.1.176-1"));
        assert_eq!(CacheEntry::at(folder.path().join("none")), None);
    }
}
