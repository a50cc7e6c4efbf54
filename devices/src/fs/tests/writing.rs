//! Changes by the guest, and changes that are refused.

use std::ffi::CString;

use super::*;
use crate::testing::{without, without_sync};

const SET_ID: u32 = 0o6000;

fn mode(guest: &Guest, name: &str) -> u32 {
    fs::symlink_metadata(guest.path(name)).unwrap().mode()
}

#[test]
fn writes_reach_the_host_at_once() {
    let mut guest = Guest::new(Access::ReadWrite);
    let (entry, fh) = guest.create(ROOT, c"new", READ_WRITE, 0o100_644).unwrap();
    assert_eq!(guest.write(entry.nodeid, fh, 0, b"from the guest"), Ok(14));
    assert_eq!(guest.write(entry.nodeid, fh, 9, b"GUEST"), Ok(5));
    assert_eq!(fs::read(guest.path("new")).unwrap(), b"from the GUEST");
    assert_eq!(guest.read(entry.nodeid, fh, 9, 10).unwrap(), b"GUEST");
    let large = vec![7; MAX_TRANSFER];
    assert_eq!(guest.write(entry.nodeid, fh, 0, &large), Ok(1 << 20));
    assert!(fs::read(guest.path("new")).unwrap() == large);
    for opcode in [op::FSYNC, op::FSYNCDIR] {
        let input = FsyncIn { fh, ..FsyncIn::default() };
        let expected = if opcode == op::FSYNC { Ok(vec![]) } else { Err(Errno::BADF) };
        assert_eq!(guest.call(opcode, entry.nodeid, &[input.as_slice()]), expected);
    }
    assert_eq!(guest.release(entry.nodeid, fh), Ok(()));
}

#[test]
fn a_write_of_an_invalid_size_or_offset_is_refused() {
    let mut guest = Guest::new(Access::ReadWrite);
    let (entry, fh) = guest.create(ROOT, c"new", WRITE, 0o600).unwrap();
    let mut write = |size, offset| {
        let input = WriteIn { fh, offset, size, ..WriteIn::default() };
        guest.call(op::WRITE, entry.nodeid, &[input.as_slice(), b"12345"]).map(drop)
    };
    assert_eq!(write(6, 0), Err(Errno::INVAL));
    assert_eq!(write(u32::MAX, 0), Err(Errno::INVAL));
    for offset in [u64::MAX, u64::MAX - 4, 1 << 63, (1 << 63) - 4] {
        assert_eq!(write(5, offset), Err(Errno::INVAL));
    }
    assert_eq!(write(4, 0), Ok(()));
    assert_eq!(fs::read(guest.path("new")).unwrap(), b"1234");
}

#[test]
fn a_handle_has_only_the_requested_access_mode() {
    let mut guest = Guest::with_files(Access::ReadWrite, |share| fs::write(share.join("file"), "x").unwrap());
    let node = guest.walk(&[c"file"]).unwrap();
    let (reader, writer) = (guest.open(node, READ).unwrap(), guest.open(node, WRITE).unwrap());
    assert_eq!(guest.write(node, reader, 0, b"y"), Err(Errno::BADF));
    assert_eq!(guest.read(node, writer, 0, 1), Err(Errno::BADF));
    assert_eq!(guest.open(node, 3), Err(Errno::INVAL));
    // OPEN ignores O_TRUNC, O_CREAT and O_EXCL.
    guest.open(node, WRITE | 0o1000 | 0o100 | 0o200).unwrap();
    assert_eq!(fs::read(guest.path("file")).unwrap(), b"x");
}

#[test]
fn appending_writes_at_the_current_end_of_the_host_s_file() {
    const APPEND: u32 = 0o2000;
    let mut guest = Guest::new(Access::ReadWrite);
    let (entry, fh) = guest.create(ROOT, c"log", WRITE | APPEND, 0o600).unwrap();
    fs::write(guest.path("log"), "host\n").unwrap();
    let input = WriteIn { fh, flags: WRITE | APPEND, ..WriteIn::default() };
    assert_eq!(guest.write_as(entry.nodeid, input, b"guest\n"), Ok(6));
    assert_eq!(fs::read(guest.path("log")).unwrap(), b"host\nguest\n");
    // A write from the page cache uses its own offset.
    let input = WriteIn { write_flags: WRITE_CACHE, ..input };
    assert_eq!(guest.write_as(entry.nodeid, input, b"HOST"), Ok(4));
    assert_eq!(fs::read(guest.path("log")).unwrap(), b"HOST\nguest\n");
}

#[test]
fn a_directory_tree_is_created_changed_and_removed() {
    let mut guest = Guest::new(Access::ReadWrite);
    let input = MkdirIn { mode: 0o755, umask: 0 };
    let directory: Entry = decode(&guest.call(op::MKDIR, ROOT, &[input.as_slice(), b"folder\0"]).unwrap());
    let (file, _) = guest.create(directory.nodeid, c"file", WRITE, 0o100_644).unwrap();
    let link: Entry = decode(&guest.call(op::SYMLINK, ROOT, &[b"link\0folder/file\0"]).unwrap());
    assert_eq!(fs::read_link(guest.path("link")).unwrap(), Path::new("folder/file"));
    let input = LinkIn { oldnodeid: file.nodeid };
    let hard: Entry = decode(&guest.call(op::LINK, ROOT, &[input.as_slice(), b"hard\0"]).unwrap());
    assert_eq!((hard.nodeid, hard.attr.nlink), (file.nodeid, 2));
    let input = LinkIn { oldnodeid: link.nodeid };
    guest.call(op::LINK, ROOT, &[input.as_slice(), b"link2\0"]).unwrap();
    assert!(fs::symlink_metadata(guest.path("link2")).unwrap().is_symlink());
    let input = RenameIn { newdir: directory.nodeid };
    guest.call(op::RENAME, ROOT, &[input.as_slice(), b"hard\0moved\0"]).unwrap();
    assert!(guest.path("folder/moved").exists());
    assert_eq!(guest.call(op::RMDIR, ROOT, &[b"folder\0"]), Err(Errno::NOTEMPTY));
    assert_eq!(guest.call(op::UNLINK, ROOT, &[b"folder\0"]), Err(Errno::ISDIR));
    for name in [c"file", c"moved"] {
        guest.call(op::UNLINK, directory.nodeid, &[name.to_bytes_with_nul()]).unwrap();
    }
    guest.call(op::RMDIR, ROOT, &[b"folder\0"]).unwrap();
    assert!(!guest.path("folder").exists());
}

#[test]
fn rename_flags_noreplace_and_exchange_work() {
    let mut guest = Guest::with_files(Access::ReadWrite, |share| {
        fs::write(share.join("a"), "a").unwrap();
        fs::write(share.join("b"), "b").unwrap();
    });
    let mut rename = |flags| {
        let input = Rename2In { newdir: ROOT, flags, padding: 0 };
        guest.call(op::RENAME2, ROOT, &[input.as_slice(), b"a\0b\0"]).map(drop)
    };
    assert_eq!(rename(1), Err(Errno::EXIST));
    assert_eq!(rename(2), Ok(()));
    assert_eq!(rename(4), Err(Errno::INVAL));
    assert_eq!(fs::read(guest.path("a")).unwrap(), b"b");
}

#[test]
fn create_opens_a_file_that_the_host_has_created_in_the_meantime() {
    let mut guest = Guest::with_files(Access::ReadWrite, |share| {
        fs::write(share.join("file"), "old").unwrap();
        symlink("../canary", share.join("link")).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, share.join("pipe"), rustix::fs::FileType::Fifo, 0o600.into(), 0)
            .unwrap();
    });
    let (_, fh) = guest.create(ROOT, c"file", READ_WRITE, 0o600).unwrap();
    let node = guest.walk(&[c"file"]).unwrap();
    assert_eq!(guest.read(node, fh, 0, 9).unwrap(), b"old");
    assert_eq!(guest.create(ROOT, c"file", READ_WRITE | 0o200, 0o600).unwrap_err(), Errno::EXIST);
    guest.create(ROOT, c"file", READ_WRITE | 0o1000, 0o600).unwrap();
    assert_eq!(fs::read(guest.path("file")).unwrap(), b"");
    assert_eq!(guest.create(ROOT, c"link", READ_WRITE | 0o1000, 0o600).unwrap_err(), Errno::ACCESS);
    assert_eq!(guest.create(ROOT, c"pipe", WRITE, 0o600).unwrap_err(), Errno::ACCESS);
}

#[test]
fn sizes_modes_and_times_are_set() {
    let mut guest =
        Guest::with_files(Access::ReadWrite, |share| fs::write(share.join("file"), "12345").unwrap());
    let node = guest.walk(&[c"file"]).unwrap();
    let set =
        SetattrIn { valid: fattr::SIZE | fattr::MODE, size: 2, mode: 0o100_640, ..SetattrIn::default() };
    let seen = guest.set(node, set).unwrap();
    assert_eq!((seen.size, seen.mode), (2, 0o100_640));
    let set = SetattrIn {
        valid: fattr::ATIME | fattr::MTIME,
        atime: 10,
        mtime: 20,
        mtimensec: 7,
        ..SetattrIn::default()
    };
    let seen = guest.set(node, set).unwrap();
    assert_eq!((seen.atime, seen.mtime, seen.mtimensec), (10, 20, 7));
    let set = SetattrIn { valid: fattr::MTIME_NOW | fattr::MTIME, ..SetattrIn::default() };
    let seen = guest.set(node, set).unwrap();
    assert_eq!(seen.atime, 10);
    assert!(seen.mtime > 20);
    let fh = guest.open(node, WRITE).unwrap();
    let set = SetattrIn { valid: fattr::SIZE | fattr::FH, fh, size: 7, ..SetattrIn::default() };
    assert_eq!(guest.set(node, set).unwrap().size, 7);
    let set = SetattrIn { valid: fattr::SIZE, size: u64::MAX, ..SetattrIn::default() };
    assert_eq!(guest.set(node, set), Err(Errno::INVAL));
    let input = FallocateIn { fh, offset: 0, length: 100, ..FallocateIn::default() };
    guest.call(op::FALLOCATE, node, &[input.as_slice()]).unwrap();
    assert_eq!(fs::metadata(guest.path("file")).unwrap().len(), 100);
    for (length, mode, why) in [(u64::MAX, 0, Errno::INVAL), (10, 0x40, Errno::OPNOTSUPP)] {
        let input = FallocateIn { fh, offset: 1, length, mode, padding: 0 };
        assert_eq!(guest.call(op::FALLOCATE, node, &[input.as_slice()]), Err(why));
    }
}

#[test]
fn modes_and_times_are_set_without_a_call_that_takes_a_path() {
    const FCHMODAT2: libc::c_long = 452;
    let mut guest = Guest::with_files(Access::ReadWrite, |share| {
        fs::write(share.join("file"), "").unwrap();
        fs::set_permissions(share.join("file"), fs::Permissions::from_mode(0o200)).unwrap();
        fs::create_dir(share.join("folder")).unwrap();
    });
    let input = MknodIn { mode: 0o010_600, ..MknodIn::default() };
    guest.call(op::MKNOD, ROOT, &[input.as_slice(), b"fifo\0"]).unwrap();
    for name in [c"file", c"folder", c"fifo"] {
        let node = guest.walk(&[name]).unwrap();
        let valid = fattr::MODE | fattr::MTIME;
        let set = SetattrIn { valid, mode: 0o640, mtime: 5, ..SetattrIn::default() };
        let attr = without([libc::SYS_fchmodat, FCHMODAT2], || guest.set(node, set)).unwrap();
        assert_eq!((attr.mode & 0o7777, attr.mtime), (0o640, 5), "{name:?}");
    }
}

#[test]
fn attributes_of_a_symbolic_link_are_not_set_and_it_is_not_followed() {
    let mut guest =
        Guest::with_files(Access::ReadWrite, |share| symlink("../canary", share.join("link")).unwrap());
    let before = fs::metadata(guest.dir.path().join("canary")).unwrap();
    let node = guest.walk(&[c"link"]).unwrap();
    for set in [
        SetattrIn { valid: fattr::MTIME, mtime: 5, ..SetattrIn::default() },
        SetattrIn { valid: fattr::MODE, mode: 0o777, ..SetattrIn::default() },
        SetattrIn { valid: fattr::SIZE, ..SetattrIn::default() },
    ] {
        assert!(guest.set(node, set).is_err());
    }
    let after = fs::metadata(guest.dir.path().join("canary")).unwrap();
    assert_eq!(
        (before.mode(), before.ctime_nsec(), before.len()),
        (after.mode(), after.ctime_nsec(), after.len())
    );
}

#[test]
fn owners_cannot_be_changed() {
    let mut guest = Guest::new(Access::ReadWrite);
    let (entry, _) = guest.create(ROOT, c"file", WRITE, 0o600).unwrap();
    let both = fattr::UID | fattr::GID;
    assert!(guest.set(entry.nodeid, SetattrIn { valid: both, ..SetattrIn::default() }).is_ok());
    for (uid, gid) in [(0, 1), (1, 0), (u32::MAX, u32::MAX)] {
        let set = SetattrIn { valid: both | fattr::MODE, mode: 0o777, uid, gid, ..SetattrIn::default() };
        assert_eq!(guest.set(entry.nodeid, set), Err(Errno::PERM));
    }
    assert_eq!(mode(&guest, "file"), 0o100_600, "the mode is unchanged too");
}

#[test]
fn set_id_bits_cannot_be_set_and_are_cleared_before_a_write() {
    let mut guest = Guest::with_files(Access::ReadWrite, |share| {
        fs::write(share.join("su"), "trusted").unwrap();
        fs::set_permissions(share.join("su"), fs::Permissions::from_mode(0o6755)).unwrap();
    });
    let (entry, _) = guest.create(ROOT, c"created", WRITE, 0o106_755).unwrap();
    let input = MknodIn { mode: 0o106_755, ..MknodIn::default() };
    guest.call(op::MKNOD, ROOT, &[input.as_slice(), b"made\0"]).unwrap();
    let input = MkdirIn { mode: 0o7755, umask: 0 };
    guest.call(op::MKDIR, ROOT, &[input.as_slice(), b"folder\0"]).unwrap();
    guest.set(entry.nodeid, SetattrIn { valid: fattr::MODE, mode: 0o6755, ..SetattrIn::default() }).unwrap();
    for name in ["created", "made", "folder"] {
        assert_eq!(mode(&guest, name) & SET_ID, 0, "{name}");
    }
    assert_eq!(mode(&guest, "folder") & 0o1000, 0o1000, "the sticky bit may be set");
    // Opening an existing set-user-ID program for writing clears the bit.
    let node = guest.walk(&[c"su"]).unwrap();
    guest.open(node, READ).unwrap();
    assert_eq!(mode(&guest, "su") & SET_ID, SET_ID);
    guest.open(node, WRITE).unwrap();
    assert_eq!(mode(&guest, "su"), 0o100_755);
}

#[test]
fn fifos_can_be_created_and_device_nodes_cannot() {
    let mut guest = Guest::new(Access::ReadWrite);
    let mut make = |mode, name: &CStr| {
        let input = MknodIn { mode, rdev: 0x103, ..MknodIn::default() };
        guest.call(op::MKNOD, ROOT, &[input.as_slice(), name.to_bytes_with_nul()])
    };
    let pipe: Entry = decode(&make(0o010_600, c"pipe").unwrap());
    for mode in [0o020_666, 0o060_666, 0o140_666, 0o120_777, 0o040_755, 0o170_000] {
        assert_eq!(make(mode, c"other"), Err(Errno::PERM), "{mode:o}");
    }
    // The server does not open FIFOs: without a process at the other end, that would block for ever.
    for flags in [READ, WRITE, READ_WRITE] {
        assert_eq!(guest.open(pipe.nodeid, flags), Err(Errno::ACCESS));
    }
}

#[test]
fn a_read_only_share_cannot_be_changed_whatever_the_guest_asks() {
    let mut guest = Guest::with_files(Access::ReadOnly, |share| {
        fs::write(share.join("file"), "x").unwrap();
        fs::create_dir(share.join("folder")).unwrap();
    });
    let node = guest.walk(&[c"file"]).unwrap();
    let fh = guest.open(node, READ).unwrap();
    let read_only = Err(Errno::ROFS);
    for flags in [WRITE, READ_WRITE] {
        assert_eq!(guest.open(node, flags), Err(Errno::ROFS));
    }
    assert_eq!(guest.create(ROOT, c"new", READ, 0o600).unwrap_err(), Errno::ROFS);
    assert_eq!(guest.write(node, fh, 0, b"y"), Err(Errno::ROFS));
    for valid in [0, fattr::MODE, fattr::SIZE, fattr::MTIME_NOW, fattr::UID] {
        assert_eq!(guest.set(node, SetattrIn { valid, ..SetattrIn::default() }), Err(Errno::ROFS));
    }
    let zeros = [0; 40];
    for (opcode, fixed) in [(op::MKNOD, 16), (op::MKDIR, 8), (op::SYMLINK, 0), (op::LINK, 8), (op::UNLINK, 0)]
    {
        assert_eq!(guest.call(opcode, ROOT, &[&zeros[..fixed], b"new\0file\0"]), read_only, "{opcode}");
    }
    for (opcode, fixed) in [(op::RMDIR, 0), (op::RENAME, 8), (op::RENAME2, 16)] {
        assert_eq!(guest.call(opcode, ROOT, &[&zeros[..fixed], b"folder\0other\0"]), read_only, "{opcode}");
    }
    assert_eq!(
        guest.call(op::FALLOCATE, node, &[FallocateIn { fh, ..FallocateIn::default() }.as_slice()]),
        read_only
    );
    assert_eq!(guest.call(op::ACCESS, node, &[AccessIn { mask: 2, padding: 0 }.as_slice()]), read_only);
    assert!(guest.call(op::ACCESS, node, &[AccessIn { mask: 4, padding: 0 }.as_slice()]).is_ok());
}

#[test]
fn a_read_only_guest_cannot_make_the_host_write_to_disk() {
    let expected = [(Access::ReadWrite, Err(Errno::IO)), (Access::ReadOnly, Ok(vec![]))];
    for (access, expected) in expected {
        let mut guest = Guest::with_files(access, |share| fs::write(share.join("file"), "x").unwrap());
        let node = guest.walk(&[c"file"]).unwrap();
        let (file, directory) = (guest.open(node, READ).unwrap(), guest.open_directory(ROOT).unwrap());
        without_sync(|| {
            for flags in [0, FDATASYNC] {
                let mut sync = |opcode, node, fh| {
                    guest.call(opcode, node, &[FsyncIn { fh, flags, padding: 0 }.as_slice()])
                };
                assert_eq!(sync(op::FSYNC, node, file), expected, "{access:?}");
                assert_eq!(sync(op::FSYNCDIR, ROOT, directory), expected, "{access:?}");
                assert_eq!(sync(op::FSYNC, node, directory), Err(Errno::BADF));
            }
        });
    }
}

#[test]
fn a_user_other_than_root_keeps_the_permissions_of_that_user() {
    if !rustix::process::geteuid().is_root() {
        // The tests run as such a user anyway.
        return;
    }
    let nobody = 65534;
    let dir = TempDir::new().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    for (name, mode) in [("open", 0o777), ("closed", 0o700)] {
        fs::create_dir(dir.path().join(name)).unwrap();
        fs::set_permissions(dir.path().join(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    fs::write(dir.path().join("open/secret"), "root's").unwrap();
    fs::set_permissions(dir.path().join("open/secret"), fs::Permissions::from_mode(0o600)).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let user = rustix::process::Uid::from_raw(nobody);
            rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            let closed = Share::open(&dir.path().join("closed"), Access::ReadOnly, 1).unwrap_err();
            assert!(closed.to_string().contains("permission denied"), "{closed}");
            let share = Share::open(&dir.path().join("open"), Access::ReadWrite, 1).unwrap();
            let mut guest = Guest { share, unique: 0, dir: TempDir::new().unwrap() };
            let secret = guest.walk(&[c"secret"]).unwrap();
            assert_eq!(guest.open(secret, READ), Err(Errno::ACCESS));
            let (entry, _) = guest.create(ROOT, c"mine", WRITE, 0o600).unwrap();
            assert_eq!(entry.attr.uid, 0);
        });
    });
    assert_eq!(fs::metadata(dir.path().join("open/mine")).unwrap().uid(), nobody);
}

#[test]
fn the_longest_name_and_symbolic_link_are_accepted() {
    let mut guest = Guest::new(Access::ReadWrite);
    let name = CString::new(vec![b'n'; 255]).unwrap();
    let target = CString::new(vec![b't'; 4095]).unwrap();
    let parts = [name.to_bytes_with_nul(), target.to_bytes_with_nul()];
    let entry: Entry = decode(&guest.call(op::SYMLINK, ROOT, &parts).unwrap());
    assert_eq!(guest.call(op::READLINK, entry.nodeid, &[]).unwrap(), target.as_bytes());
}
