//! Other mounts inside of a share. These tests need root. Otherwise they print a note and do nothing.

use rustix::mount::{MountFlags, mount, mount_bind};

use super::*;
use crate::testing::without;

/// Mounts something in a share, in a directory of this name.
fn mounted(guest: &Guest, name: &str, mount: impl FnOnce(&Path) -> rustix::io::Result<()>) -> Option<Mount> {
    let at = guest.path(name);
    fs::create_dir(&at).unwrap();
    Mount::new(at, mount)
}

#[test]
fn procfs_in_a_share_is_not_accessible() {
    let mut guest = Guest::new(Access::ReadWrite);
    let proc = |at: &Path| mount("proc", at, "proc", MountFlags::empty(), None);
    let Some(_mount) = mounted(&guest, "proc", proc) else { return };
    assert_eq!(guest.look_up(ROOT, c"proc"), Err(Errno::ACCESS));
    let entries = guest.list(ROOT, op::READDIRPLUS, 4096).unwrap();
    let entry = entries.iter().find(|entry| entry.0 == b"proc").unwrap();
    assert_eq!(entry.2.unwrap().nodeid, 0);
}

#[test]
fn a_file_of_procfs_in_a_share_is_not_truncated() {
    let mut guest = Guest::new(Access::ReadWrite);
    let at = guest.path("file");
    fs::write(&at, "").unwrap();
    if mount_bind("/proc/self/comm", &at).is_err() {
        eprintln!("not tested: this user cannot mount");
        return;
    }
    let _mount = Mount(at);
    let truncate = libc::SYS_ftruncate;
    let created = without([truncate, truncate], || guest.create(ROOT, c"file", WRITE | 0o1000, 0o600));
    assert_eq!(created.unwrap_err(), Errno::ACCESS);
}

#[test]
fn a_mount_in_a_share_is_shared_with_distinct_inode_numbers() {
    let mut guest = Guest::new(Access::ReadWrite);
    let tmpfs = |at: &Path| mount("tmpfs", at, "tmpfs", MountFlags::empty(), None);
    let Some(_mount) = mounted(&guest, "other", tmpfs) else { return };
    fs::write(guest.path("other/file"), "there").unwrap();
    let entry = guest.look_up(ROOT, c"other").unwrap();
    let real = fs::metadata(guest.path("other")).unwrap().ino();
    assert_eq!(entry.attr.ino, real + (1 << 48));
    let node = guest.look_up(entry.nodeid, c"file").unwrap().nodeid;
    let fh = guest.open(node, READ).unwrap();
    assert_eq!(guest.read(node, fh, 0, 10).unwrap(), b"there");
}

#[test]
fn two_mounts_of_a_directory_are_two_nodes() {
    let mut guest = Guest::with_files(Access::ReadWrite, |share| {
        fs::create_dir(share.join("a")).unwrap();
        fs::write(share.join("a/file"), "").unwrap();
    });
    let source = guest.path("a");
    let read_only = |at: &Path| {
        mount_bind(&source, at)?;
        rustix::mount::mount_remount(at, MountFlags::BIND | MountFlags::RDONLY, "")
    };
    let Some(_mount) = mounted(&guest, "b", read_only) else { return };
    let (a, b) = (guest.walk(&[c"a"]).unwrap(), guest.walk(&[c"b"]).unwrap());
    assert_ne!(a, b);
    let (in_a, in_b) = (guest.look_up(a, c"file").unwrap(), guest.look_up(b, c"file").unwrap());
    assert!(guest.open(in_a.nodeid, WRITE).is_ok());
    assert_eq!(guest.open(in_b.nodeid, WRITE), Err(Errno::ROFS), "the host's mount is read-only");
}
