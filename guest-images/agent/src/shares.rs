//! Mounts shared directories of the host at the same paths in the guest.

use std::ffi::{CString, OsStr};
use std::fs;
use std::io::{Error, Result};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use guest_agent::protocol::{Access, Share};

use crate::sys;

/// Mounts a share. The error is for the user.
pub fn mount(share: &Share) -> std::result::Result<(), String> {
    let path = Path::new(&share.path);
    fs::create_dir_all(path)
        .and_then(|()| mount_at(share))
        .map_err(|error| format!("cannot mount {}: {}", path.display(), reason(&error)))
}

fn mount_at(share: &Share) -> Result<()> {
    let access = match share.access {
        Access::ReadOnly => libc::MS_RDONLY,
        Access::ReadWrite => 0,
    };
    // Set-user-ID programs and device nodes of the host have no effect in the guest.
    let flags = access | libc::MS_NOSUID | libc::MS_NODEV;
    sys::mount(&c_string(&share.tag)?, &c_string(&share.path)?, c"virtiofs", flags)
}

fn reason(error: &Error) -> String {
    if error.raw_os_error() == Some(libc::ENODEV) {
        "the guest's kernel has no virtio-fs (CONFIG_FUSE_FS, CONFIG_VIRTIO_FS)".to_owned()
    } else {
        error.to_string()
    }
}

fn c_string(string: &OsStr) -> Result<CString> {
    Ok(CString::new(string.as_bytes())?)
}
