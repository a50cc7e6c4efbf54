//! Who can change what is in the cache. Programs are run from there, also by root, so a cache that somebody else can
//! change is not used.
//!
//! The cache's directory and each directory above it must belong to this user or to root, and nobody else may write to
//! it. Directories above the cache may also be sticky, like `/tmp`, where nobody can rename what belongs to others. The
//! path is the one without symbolic links. As nobody else can change any part of this path, it leads to the same
//! directory after the check. A cache that belongs to root can therefore be used by everybody who can read it.

use std::fs::{self, DirBuilder, Metadata, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{self, Path, PathBuf};

use crate::error::{Error, Result};

const ROOT: u32 = 0;
const STICKY: u32 = 0o1000;
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// The reason why others can change what is in a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Risk {
    /// It belongs to this user.
    Owner(u32),
    Mode(u32),
}

/// Returns who besides `user` and root can change what is in a directory with this owner and mode.
fn risk(owner: u32, mode: u32, user: u32) -> Option<Risk> {
    if owner != user && owner != ROOT {
        Some(Risk::Owner(owner))
    } else {
        (mode & WRITABLE_BY_OTHERS != 0).then_some(Risk::Mode(mode & 0o7777))
    }
}

fn risk_of(found: &Metadata) -> Option<Risk> {
    risk(found.uid(), found.mode(), rustix::process::geteuid().as_raw())
}

/// Checks the directory of a cache, creates it if necessary, and returns its path without symbolic links.
pub fn open(cache: &Path) -> Result<PathBuf> {
    let real = |path: &Path| fs::canonicalize(path).map_err(Error::io("find", path));
    let absolute = path::absolute(cache).map_err(Error::io("find", cache))?;
    if !absolute.exists() {
        // Root leaves nothing of its own in another user's directory.
        if let Some(above) = absolute.ancestors().find(|folder| folder.exists()) {
            check(&absolute, &real(above)?)?;
        }
        // It is for this user alone, like any directory above it that is created.
        let created = DirBuilder::new().mode(0o700).recursive(true).create(&absolute);
        created.map_err(Error::io("create", &absolute))?;
    }
    let cache = real(&absolute)?;
    check(&cache, &cache)?;
    Ok(cache)
}

/// Checks a directory, which is that of a cache or above it, and all directories above.
fn check(cache: &Path, from: &Path) -> Result<()> {
    for folder in from.ancestors() {
        let found = fs::symlink_metadata(folder).map_err(Error::io("find", folder))?;
        let (cache, folder) = (cache.to_owned(), folder.to_owned());
        match risk_of(&found) {
            Some(Risk::Owner(owner)) => return Err(Error::CacheOfOther { cache, folder, owner }),
            Some(Risk::Mode(mode)) if mode & STICKY == 0 || folder == cache => {
                return Err(Error::CacheWritable { cache, folder, mode });
            }
            Some(Risk::Mode(_)) | None => {}
        }
    }
    Ok(())
}

/// Returns true if there is a directory at a path in the cache that nobody else can change. Symbolic links are not
/// followed.
pub fn is_trusted(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.is_dir() && risk_of(&found).is_none())
}

/// Creates a directory in the cache for this user alone: what programs write there may have any mode that the process's
/// umask leaves.
pub fn create(path: &Path) -> io::Result<()> {
    DirBuilder::new().mode(0o700).create(path)
}

/// Opens a directory that [`create`] has made to whoever may read the cache, when all is in it. Whatever the umask was,
/// nobody else can write to what is there; nobody else can have opened it before.
pub fn publish(path: &Path) -> io::Result<()> {
    take_from_others(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o755))
}

/// Takes the right to write from others, for a directory and all that is in it. Symbolic links are not followed.
fn take_from_others(path: &Path) -> io::Result<()> {
    for entry in fs::read_dir(path)? {
        let path = entry?.path();
        let found = fs::symlink_metadata(&path)?;
        if found.is_dir() {
            take_from_others(&path)?;
        }
        if !found.is_symlink() && found.mode() & WRITABLE_BY_OTHERS != 0 {
            fs::set_permissions(&path, Permissions::from_mode(found.mode() & 0o7777 & !WRITABLE_BY_OTHERS))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_user_and_root_may_own_or_write() {
        assert_eq!(risk(1000, 0o40755, 1000), None);
        assert_eq!(risk(0, 0o40755, 1000), None, "what root has built is for everybody");
        assert_eq!(risk(1000, 0o40700, 0), Some(Risk::Owner(1000)), "root runs no user's programs");
        assert_eq!(risk(1001, 0o40755, 1000), Some(Risk::Owner(1001)));
        assert_eq!(risk(1000, 0o40775, 1000), Some(Risk::Mode(0o775)));
        assert_eq!(risk(0, 0o41777, 1000), Some(Risk::Mode(0o1777)));
    }
}
