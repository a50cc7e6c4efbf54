//! Reading files, directories and attributes.

use super::*;

fn example() -> Guest {
    Guest::with_files(Access::ReadOnly, |share| {
        fs::create_dir(share.join("folder")).unwrap();
        fs::write(share.join("folder/file"), "the host's words").unwrap();
        symlink("/etc/passwd", share.join("link")).unwrap();
    })
}

#[test]
fn a_guest_reads_the_host_s_bytes_up_to_the_end_of_the_file() {
    let mut guest = example();
    let node = guest.walk(&[c"folder", c"file"]).unwrap();
    let fh = guest.open(node, READ).unwrap();
    assert_eq!(guest.read(node, fh, 0, 4096).unwrap(), b"the host's words");
    assert_eq!(guest.read(node, fh, 4, 6).unwrap(), b"host's");
    assert_eq!(guest.read(node, fh, 16, 10).unwrap(), b"");
    assert_eq!(guest.release(node, fh), Ok(()));
    assert_eq!(guest.read(node, fh, 0, 1), Err(Errno::BADF));
    assert_eq!(guest.release(node, fh), Err(Errno::BADF));
}

#[test]
fn a_mebibyte_is_read_with_one_request() {
    let mut guest = example();
    let data: Vec<u8> = (0..=250).cycle().take(MAX_TRANSFER + 1).collect();
    fs::write(guest.path("large"), &data).unwrap();
    let node = guest.walk(&[c"large"]).unwrap();
    let fh = guest.open(node, READ).unwrap();
    assert!(guest.read(node, fh, 0, 1 << 20).unwrap() == data[..MAX_TRANSFER]);
    assert!(guest.read(node, fh, 0, u32::MAX).unwrap() == data[..MAX_TRANSFER]);
    assert_eq!(guest.read(node, fh, 1 << 20, 1 << 20).unwrap(), data[MAX_TRANSFER..]);
}

#[test]
fn a_file_that_the_host_truncates_is_shorter_in_the_guest() {
    let mut guest = example();
    let node = guest.walk(&[c"folder", c"file"]).unwrap();
    let fh = guest.open(node, READ).unwrap();
    fs::write(guest.path("folder/file"), "the").unwrap();
    assert_eq!(guest.read(node, fh, 0, 4096).unwrap(), b"the");
    assert_eq!(guest.read(node, fh, 4, 4096).unwrap(), b"");
    assert_eq!(guest.attributes(node).unwrap().size, 3);
}

#[test]
fn a_change_on_the_host_is_seen_within_a_second() {
    let mut guest = example();
    let entry = guest.look_up(ROOT, c"folder").unwrap();
    assert_eq!(
        (entry.entry_valid, entry.entry_valid_nsec, entry.attr_valid, entry.attr_valid_nsec),
        (1, 0, 1, 0)
    );
    let before = guest.walk(&[c"folder", c"file"]).unwrap();
    fs::write(guest.path("folder/new"), "other").unwrap();
    fs::rename(guest.path("folder/new"), guest.path("folder/file")).unwrap();
    let after = guest.walk(&[c"folder", c"file"]).unwrap();
    assert_ne!(after, before, "another file has another node ID");
    assert_eq!(guest.attributes(after).unwrap().size, 5);
    fs::remove_file(guest.path("folder/file")).unwrap();
    assert_eq!(guest.walk(&[c"folder", c"file"]), Err(Errno::NOENT));
}

#[test]
fn hard_links_are_one_file() {
    let mut guest = example();
    fs::hard_link(guest.path("folder/file"), guest.path("same")).unwrap();
    let (one, other) = (guest.walk(&[c"folder", c"file"]).unwrap(), guest.walk(&[c"same"]).unwrap());
    assert_eq!(one, other);
    assert_eq!(guest.attributes(one).unwrap().nlink, 2);
}

#[test]
fn a_symbolic_link_is_read_and_never_followed() {
    let mut guest = example();
    let entry = guest.look_up(ROOT, c"link").unwrap();
    assert_eq!(entry.attr.mode & 0o170_000, 0o120_000);
    assert_eq!(guest.call(op::READLINK, entry.nodeid, &[]).unwrap(), b"/etc/passwd");
    assert_eq!(guest.open(entry.nodeid, READ), Err(Errno::ACCESS));
    assert_eq!(guest.open_directory(entry.nodeid), Err(Errno::NOTDIR));
    assert_eq!(guest.look_up(entry.nodeid, c"x"), Err(Errno::NOTDIR));
    assert_eq!(guest.call(op::READLINK, ROOT, &[]), Err(Errno::INVAL));
}

#[test]
fn files_of_the_user_who_runs_tally_belong_to_root_in_the_guest() {
    let mut guest = example();
    fs::write(guest.path("mine"), "").unwrap();
    let meta = fs::metadata(guest.path("mine")).unwrap();
    let entry = guest.look_up(ROOT, c"mine").unwrap();
    assert_eq!((entry.attr.uid, entry.attr.gid), (0, 0));
    let mut other = Owner::current();
    (other.user, other.group) = (meta.uid().wrapping_add(1), meta.gid().wrapping_add(1));
    guest.share.server.owner = other;
    let entry = guest.look_up(ROOT, c"mine").unwrap();
    assert_eq!((entry.attr.uid, entry.attr.gid), (meta.uid(), meta.gid()));
}

#[test]
fn owners_and_permissions_may_be_kept_elsewhere() {
    let mut guest = example();
    for name in ["kept", "other"] {
        fs::write(guest.path(name), "").unwrap();
        fs::set_permissions(guest.path(name), fs::Permissions::from_mode(0o700)).unwrap();
    }
    let inode = fs::metadata(guest.path("kept")).unwrap().ino();
    let folder = Host::open_root(&guest.path("")).unwrap();
    let kept = FileOwner { user: 33, group: 34, mode: 0o4750 };
    // In any order.
    let all = vec![(u64::MAX, kept), (inode, kept), (1, kept)];
    guest.share.server.owner.keep(&folder, all).unwrap();
    let seen = |guest: &mut Guest, name| {
        let attr = guest.look_up(ROOT, name).unwrap().attr;
        (attr.uid, attr.gid, attr.mode)
    };
    assert_eq!(seen(&mut guest, c"kept"), (33, 34, 0o10_4750));
    assert_eq!(seen(&mut guest, c"other"), (0, 0, 0o10_0700));
}

#[test]
fn attributes_are_those_of_the_host() {
    let mut guest = example();
    fs::set_permissions(guest.path("folder/file"), fs::Permissions::from_mode(0o4751)).unwrap();
    let node = guest.walk(&[c"folder", c"file"]).unwrap();
    let (seen, real) = (guest.attributes(node).unwrap(), fs::metadata(guest.path("folder/file")).unwrap());
    assert_eq!((seen.ino, seen.size, seen.blocks), (real.ino(), real.size(), real.blocks()));
    assert_eq!((seen.mode, u64::from(seen.nlink)), (real.mode(), real.nlink()));
    assert_eq!((seen.mtime.cast_signed(), i64::from(seen.mtimensec)), (real.mtime(), real.mtime_nsec()));
    assert_eq!((seen.ctime.cast_signed(), i64::from(seen.ctimensec)), (real.ctime(), real.ctime_nsec()));
}

#[test]
fn ten_thousand_files_are_listed_each_once() {
    let mut guest = example();
    fs::create_dir(guest.path("many")).unwrap();
    let mut names: Vec<Vec<u8>> =
        (0..10_000).map(|i| format!("a file of that name, {i}").into_bytes()).collect();
    for name in &names {
        fs::write(guest.path("many").join(str::from_utf8(name).unwrap()), "").unwrap();
    }
    names.extend([b".".to_vec(), b"..".to_vec()]);
    names.sort();
    let node = guest.walk(&[c"many"]).unwrap();
    for (opcode, size) in
        [(op::READDIR, 4096), (op::READDIR, 1 << 20), (op::READDIRPLUS, 4096), (op::READDIRPLUS, 1 << 17)]
    {
        let entries = guest.list(node, opcode, size).unwrap();
        let mut listed: Vec<_> = entries.iter().map(|entry| entry.0.clone()).collect();
        listed.sort();
        assert!(listed == names, "{opcode} {size}");
        for (name, dirent, found) in &entries {
            let special = matches!(name.as_slice(), b"." | b"..");
            assert_eq!(dirent.kind, if special { 4 } else { 8 });
            if let Some(found) = found {
                assert_eq!(found.nodeid == 0, special);
                assert!(special || found.attr.ino == dirent.ino);
            }
        }
    }
    assert_eq!(guest.share.server.nodes.counts().0, 10_002);
}

#[test]
fn the_parent_of_the_share_is_shown_as_the_share() {
    let mut guest = example();
    let own = fs::metadata(guest.path("")).unwrap().ino();
    for opcode in [op::READDIR, op::READDIRPLUS] {
        let entries = guest.list(ROOT, opcode, 4096).unwrap();
        let up = entries.iter().find(|entry| entry.0 == b"..").unwrap();
        assert_eq!(up.1.ino, own);
    }
}

#[test]
fn lseek_finds_holes() {
    let mut guest = example();
    fs::File::create(guest.path("holes")).unwrap().set_len(1 << 20).unwrap();
    let node = guest.walk(&[c"holes"]).unwrap();
    let fh = guest.open(node, READ).unwrap();
    let mut seek = |offset, whence| {
        let input = LseekIn { fh, offset, whence, padding: 0 };
        guest.call(op::LSEEK, node, &[input.as_slice()]).map(|reply| decode::<LseekOut>(&reply).offset)
    };
    assert_eq!(seek(0, 3), Err(Errno::NXIO));
    assert_eq!(seek(4096, 4), Ok(4096));
    assert_eq!(seek(0, 0), Err(Errno::INVAL));
    assert_eq!(seek(u64::MAX, 3), Err(Errno::INVAL));
}

#[test]
fn statfs_returns_the_host_s_values() {
    let mut guest = example();
    let reply: StatfsOut = decode(&guest.call(op::STATFS, ROOT, &[]).unwrap());
    let host = rustix::fs::statvfs(guest.path("").as_path()).unwrap();
    assert_eq!((reply.blocks, u64::from(reply.bsize)), (host.f_blocks, host.f_bsize));
    assert_eq!(reply.namelen, 255);
}

#[test]
fn a_directory_that_the_host_deletes_is_gone() {
    let mut guest = example();
    let directory = guest.walk(&[c"folder"]).unwrap();
    fs::remove_dir_all(guest.path("")).unwrap();
    assert_eq!(guest.look_up(ROOT, c"folder"), Err(Errno::NOENT));
    assert_eq!(guest.look_up(directory, c"file"), Err(Errno::NOENT));
    assert_eq!(guest.list(directory, op::READDIRPLUS, 4096), Err(Errno::NOENT));
    assert!(guest.attributes(ROOT).is_ok());
}
