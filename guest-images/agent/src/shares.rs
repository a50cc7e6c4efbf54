//! Mounts shared directories of the host at the same paths in the guest.

use std::ffi::{CStr, CString, OsStr};
use std::fs;
use std::io::Result;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use guest_agent::protocol::{Access, Share};

use crate::{root, sys};

const KIND: &CStr = c"virtiofs";

/// Mounts a share. The error is for the user.
pub fn mount(share: &Share) -> std::result::Result<(), String> {
    let path = Path::new(&share.path);
    fs::create_dir_all(path)
        .and_then(|()| mount_at(share))
        .map_err(|error| format!("cannot mount {}: {}", path.display(), root::reason(KIND, &error)))
}

fn mount_at(share: &Share) -> Result<()> {
    let access = match share.access {
        Access::ReadOnly => libc::MS_RDONLY,
        Access::ReadWrite => 0,
    };
    // Set-user-ID programs and device nodes of the host have no effect in the guest.
    let flags = access | libc::MS_NOSUID | libc::MS_NODEV;
    sys::mount(&c_string(&share.tag)?, &c_string(&share.path)?, KIND, flags)?;
    read_far_ahead(Path::new(&share.path));
    Ok(())
}

/// Lets the kernel read as much ahead from a share as fits a request. By itself, it reads an eighth of that, each in a
/// request of its own.
pub fn read_far_ahead(share: &Path) {
    const KIB: &str = "1024";
    let Ok(device) = fs::metadata(share).map(|share| share.dev()) else { return };
    let (major, minor) = (libc::major(device), libc::minor(device));
    // Without the file (CONFIG_SYSFS), reading is only slower.
    let _ = fs::write(format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb"), KIB);
}

fn c_string(string: &OsStr) -> Result<CString> {
    Ok(CString::new(string.as_bytes())?)
}
