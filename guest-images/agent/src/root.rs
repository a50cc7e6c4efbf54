//! Makes a directory of the host the root of the command: read-only, under an overlay in the guest's memory.
//!
//! The agent itself moves there too, so that each path is the command's from then on. The kernel's file systems, `/run`
//! and `/tmp` stay those of the guest. The initial file system remains below all that, for the few programs in it that
//! the agent runs later.

use std::ffi::{CStr, CString, OsStr};
use std::fs::{self, File};
use std::io::{Error, ErrorKind, Result};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use guest_agent::protocol::{Network, OWN_FOLDERS, Start};

use crate::{read_ahead, sys};

/// The initial file system, once there is another root.
static INITIAL: OnceLock<OwnedFd> = OnceLock::new();

/// Where the parts of the root are mounted in the initial file system: what the host shares, the memory in which
/// changes are kept, and the overlay.
const HOST: &CStr = c"/lib/tally/root/host";
const MEMORY: &CStr = c"/lib/tally/root/memory";
const OVERLAY: &CStr = c"/lib/tally/root/overlay";
/// Inode numbers of a share use all bits, so none is left to tell layers apart.
const LAYERS: &CStr = c"lowerdir=/lib/tally/root/host,upperdir=/lib/tally/root/memory/upper,workdir=/lib/tally/root/memory/work,xino=off";
const NAME_SERVERS: &str = "etc/resolv.conf";

/// Mounts the root and moves there, if the command has one. Must be called when the network has been set up. The error
/// is for the user.
pub fn enter(start: &Start) -> std::result::Result<(), String> {
    let Some(tag) = &start.root else { return Ok(()) };
    mount_layers(tag)?;
    move_to(OVERLAY, start.network.as_ref()).map_err(|error| format!("cannot change to the root: {error}"))
}

fn mount_layers(tag: &OsStr) -> std::result::Result<(), String> {
    let tag = CString::new(tag.as_bytes()).map_err(|error| error.to_string())?;
    // The host's set-user-ID programs and device nodes have no effect in the guest.
    let flags = libc::MS_NOSUID | libc::MS_NODEV;
    mount(&tag, HOST, c"virtiofs", flags | libc::MS_RDONLY, c"")?;
    read_ahead::raise(path(HOST));
    mount(c"tmpfs", MEMORY, c"tmpfs", flags, c"mode=755")?;
    for layer in ["upper", "work"] {
        fs::create_dir(path(MEMORY).join(layer)).map_err(|error| format!("cannot make the root: {error}"))?;
    }
    mount(c"root", OVERLAY, c"overlay", flags, LAYERS)
}

fn mount(
    source: &CStr,
    target: &CStr,
    kind: &CStr,
    flags: libc::c_ulong,
    options: &CStr,
) -> std::result::Result<(), String> {
    fs::create_dir_all(path(target))
        .and_then(|()| sys::mount_with(source, target, kind, flags, options))
        .map_err(|error| format!("cannot mount the root: {}", reason(kind, &error)))
}

/// Returns why a file system cannot be mounted: with the kernel's options if it has no such file system.
pub fn reason(kind: &CStr, error: &Error) -> String {
    let options = match kind.to_bytes() {
        b"virtiofs" => "virtio-fs (CONFIG_FUSE_FS, CONFIG_VIRTIO_FS)",
        b"overlay" => "overlay file system (CONFIG_OVERLAY_FS)",
        _ => return error.to_string(),
    };
    if error.raw_os_error() == Some(libc::ENODEV) {
        format!("the guest's kernel has no {options}")
    } else {
        error.to_string()
    }
}

fn move_to(root: &CStr, network: Option<&Network>) -> Result<()> {
    for folder in OWN_FOLDERS {
        let place = path(root).join(folder);
        make_folder(&place)?;
        let (own, place) = (c_path(&Path::new("/").join(folder))?, c_path(&place)?);
        sys::mount(&own, &place, c"", libc::MS_BIND | libc::MS_REC)?;
    }
    if network.is_some() {
        // The DHCP client goes on to write its own file.
        use_file(&Path::new("/").join(NAME_SERVERS), &path(root).join(NAME_SERVERS))?;
    }
    let initial = File::open("/")?;
    std::env::set_current_dir(path(root))?;
    sys::mount(c".", c"/", c"", libc::MS_MOVE)?;
    sys::change_root(c".")?;
    std::env::set_current_dir("/")?;
    // It is entered once.
    let _ = INITIAL.set(initial.into());
    Ok(())
}

/// Shows a file of the initial file system in the root, whatever is there.
fn use_file(file: &Path, place: &Path) -> Result<()> {
    if let Some(folder) = place.parent() {
        fs::create_dir_all(folder)?;
    }
    // It is often a link to where the host's programs keep it.
    match fs::remove_file(place) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    File::create(place)?;
    // It does not exist before a server has said something.
    File::options().append(true).create(true).open(file)?;
    sys::mount(&c_path(file)?, &c_path(place)?, c"", libc::MS_BIND)
}

fn make_folder(place: &Path) -> Result<()> {
    match fs::create_dir(place) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}

/// Lets a command be run in the initial file system, whose programs it needs.
pub fn leave(command: &mut Command) {
    use std::os::fd::AsRawFd;
    let Some(initial) = INITIAL.get().map(AsRawFd::as_raw_fd) else { return };
    let leave = move || {
        sys::change_directory(initial)?;
        sys::change_root(c".")
    };
    // SAFETY: Between fork and exec, `leave` only makes system calls. It neither allocates nor locks.
    unsafe { command.pre_exec(leave) };
}

fn path(path: &CStr) -> &Path {
    Path::new(OsStr::from_bytes(path.to_bytes()))
}

fn c_path(path: &Path) -> Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_system_that_the_kernel_does_not_have_is_told_by_its_options() {
        let missing = Error::from_raw_os_error(libc::ENODEV);
        assert!(reason(c"virtiofs", &missing).ends_with("no virtio-fs (CONFIG_FUSE_FS, CONFIG_VIRTIO_FS)"));
        assert!(reason(c"overlay", &missing).ends_with("no overlay file system (CONFIG_OVERLAY_FS)"));
        let other = Error::from_raw_os_error(libc::ENOMEM);
        assert_eq!(reason(c"overlay", &other), other.to_string());
    }

    #[test]
    fn a_folder_that_is_there_already_is_used() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("dev");
        make_folder(&place).unwrap();
        make_folder(&place).unwrap();
        assert!(make_folder(&place.join("none/dev")).is_err());
    }
}
