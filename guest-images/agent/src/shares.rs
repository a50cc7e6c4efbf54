//! Mounts shared directories of the host at the same paths in the guest.

use std::ffi::{CStr, CString, OsStr};
use std::fs;
use std::io::Result;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use guest_agent::protocol::{Access, Share};

use crate::{read_ahead, root, sys};

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
    read_ahead::raise(Path::new(&share.path));
    Ok(())
}

fn c_string(string: &OsStr) -> Result<CString> {
    Ok(CString::new(string.as_bytes())?)
}
