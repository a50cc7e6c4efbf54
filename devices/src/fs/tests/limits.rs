//! Limits on the host's resources that a guest uses.

use super::*;

fn guest_with_limits(files: usize, nodes: usize, descriptors: usize) -> Guest {
    let mut guest = Guest::with_files(Access::ReadWrite, |share| {
        for i in 0..files {
            fs::write(share.join(i.to_string()), i.to_string()).unwrap();
        }
    });
    let limits = Limits { nodes, descriptors, ..MEMORY };
    guest.share = Share::with_limits(&guest.path(""), Access::ReadWrite, everything, limits).unwrap();
    guest
}

fn name(i: usize) -> std::ffi::CString {
    std::ffi::CString::new(i.to_string()).unwrap()
}

/// Looks a file up and uses it otherwise than by its attributes, so that its node is open.
fn use_file(guest: &mut Guest, i: usize) -> u64 {
    let node = guest.walk(&[&name(i)]).unwrap();
    guest.call(op::ACCESS, node, &[AccessIn { mask: 4, padding: 0 }.as_slice()]).unwrap();
    node
}

fn forget(guest: &mut Guest, node: u64, nlookup: u64) {
    assert!(guest.call_raw(op::FORGET, node, &[ForgetIn { nlookup }.as_slice()], 0).is_none());
}

#[test]
fn a_guest_references_many_files_with_few_descriptors() {
    let mut guest = guest_with_limits(300, 1000, 16);
    let nodes: Vec<u64> = (0..300).map(|i| guest.walk(&[&name(i)]).unwrap()).collect();
    assert_eq!(guest.share.server.nodes.counts(), (301, 1), "what is only looked at is not open");
    let used: Vec<u64> = (0..300).map(|i| use_file(&mut guest, i)).collect();
    assert_eq!(used, nodes);
    for (i, &node) in nodes.iter().enumerate() {
        assert_eq!(guest.attributes(node).unwrap().size, i.to_string().len() as u64);
        assert_eq!(guest.walk(&[&name(i)]), Ok(node), "the node ID stays the same");
    }
    assert_eq!(guest.share.server.nodes.counts(), (301, 17));
}

#[test]
fn a_renamed_file_is_opened_again_by_its_new_name() {
    let mut guest = guest_with_limits(100, 1000, 16);
    let node = guest.walk(&[c"7"]).unwrap();
    let input = RenameIn { newdir: ROOT };
    guest.call(op::RENAME, ROOT, &[input.as_slice(), b"7\0moved\0"]).unwrap();
    for i in 8..100 {
        use_file(&mut guest, i);
    }
    assert_eq!(guest.attributes(node).unwrap().size, 1);
}

#[test]
fn a_different_file_of_the_same_name_makes_the_old_node_stale() {
    let mut guest = guest_with_limits(100, 1000, 16);
    let node = use_file(&mut guest, 7);
    for i in 8..100 {
        use_file(&mut guest, i);
    }
    fs::rename(guest.path("1"), guest.path("7")).unwrap();
    assert_eq!(guest.attributes(node), Err(Errno::STALE));
    assert_eq!(guest.open(node, READ), Err(Errno::STALE));
    assert_ne!(guest.walk(&[c"7"]).unwrap(), node);
}

#[test]
fn an_unlinked_open_file_stays_accessible() {
    let mut guest = guest_with_limits(100, 1000, 16);
    let node = guest.walk(&[c"7"]).unwrap();
    let fh = guest.open(node, READ).unwrap();
    guest.call(op::UNLINK, ROOT, &[b"7\0"]).unwrap();
    for i in 8..100 {
        use_file(&mut guest, i);
    }
    assert_eq!(guest.attributes(node).unwrap().nlink, 0);
    assert_eq!(guest.read(node, fh, 0, 10).unwrap(), b"7");
}

#[test]
fn handles_and_descriptors_are_limited() {
    let mut guest = guest_with_limits(20, 1000, 8);
    let open: Vec<(u64, u64)> = (0..4)
        .map(|i| {
            let node = guest.walk(&[&name(i)]).unwrap();
            (node, guest.open(node, READ).unwrap())
        })
        .collect();
    assert_eq!(guest.open(open[0].0, READ), Err(Errno::NFILE));
    assert_eq!(guest.open_directory(ROOT), Err(Errno::NFILE));
    assert_eq!(guest.create(ROOT, c"new", WRITE, 0o600).unwrap_err(), Errno::NFILE);
    assert!(!guest.path("new").exists());
    guest.release(open[3].0, open[3].1).unwrap();
    assert!(guest.open(open[0].0, READ).is_ok());
}

#[test]
fn an_open_file_counts_towards_the_limit_even_if_its_node_is_forgotten() {
    let mut guest = guest_with_limits(40, 1000, 16);
    let opened = (0..20).map_while(|i| {
        let node = guest.walk(&[&name(i)]).unwrap();
        let opened = guest.open(node, READ).ok();
        forget(&mut guest, node, 1);
        opened
    });
    // Each handle takes two of sixteen descriptors: its own and the path descriptor. Another sixteen are for nodes.
    assert_eq!(opened.count(), 8);
    for i in 20..40 {
        use_file(&mut guest, i);
    }
    assert_eq!(guest.share.server.nodes.counts(), (21, 17));
}

#[test]
fn all_shares_together_use_a_quarter_of_the_descriptors() {
    assert_eq!([1, 2, 7].map(|shares| descriptors_per_share(4096, shares)), [512, 256, 73]);
    for shares in 1..8 {
        assert!(2 * descriptors_per_share(1024, shares) * shares <= 1024 / 4);
    }
    assert_eq!((descriptors_per_share(100, 7), descriptors_per_share(u64::MAX, 1)), (8, 1 << 16));
}

#[test]
fn each_lookup_of_a_node_has_to_be_forgotten() {
    let mut guest = guest_with_limits(5, 11, 16);
    let node = guest.walk(&[c"3"]).unwrap();
    assert_eq!(guest.walk(&[c"3"]), Ok(node));
    forget(&mut guest, node, 1);
    assert!(guest.attributes(node).is_ok());
    forget(&mut guest, node, u64::MAX);
    assert_eq!(guest.attributes(node), Err(Errno::STALE));
    assert_eq!(guest.share.server.nodes.counts(), (1, 1));
}

#[test]
fn a_guest_that_forgets_nothing_finds_any_number_of_files() {
    let mut guest = guest_with_limits(100, 20, 16);
    let nodes: Vec<u64> = (0..100).map(|i| guest.walk(&[&name(i)]).unwrap()).collect();
    assert_eq!(guest.share.server.nodes.counts().0, 20);
    assert!(guest.attributes(nodes[99]).is_ok());
    // The guest's kernel looks the name up again.
    assert_eq!(guest.attributes(nodes[3]), Err(Errno::STALE));
    let again = guest.walk(&[c"3"]).unwrap();
    assert_ne!(again, nodes[3]);
    forget(&mut guest, nodes[3], 1);
    assert!(guest.attributes(again).is_ok());
    let entries = guest.list(ROOT, op::READDIRPLUS, 1 << 20).unwrap();
    assert_eq!(entries.iter().filter(|entry| entry.2.unwrap().nodeid != 0).count(), 100);
}

#[test]
fn an_open_file_is_not_evicted() {
    let mut guest = guest_with_limits(100, 20, 16);
    let node = guest.walk(&[c"7"]).unwrap();
    let fh = guest.open(node, READ).unwrap();
    for i in 8..100 {
        use_file(&mut guest, i);
    }
    assert_eq!(guest.attributes(node).unwrap().size, 1);
    assert_eq!(guest.read(node, fh, 0, 10).unwrap(), b"7");
}

/// Sends each request that creates the entry `new` in the root. Returns the errors.
fn create_each(guest: &mut Guest, link: u64, reply_size: usize) -> Vec<Errno> {
    let create = CreateIn { flags: WRITE, mode: 0o600, ..CreateIn::default() };
    let node = MknodIn { mode: 0o100_600, ..MknodIn::default() };
    let directory = MkdirIn { mode: 0o700, umask: 0 };
    let link = LinkIn { oldnodeid: link };
    let requests: [(u32, &[u8], &[u8]); 5] = [
        (op::CREATE, create.as_slice(), b"new\0"),
        (op::MKNOD, node.as_slice(), b"new\0"),
        (op::MKDIR, directory.as_slice(), b"new\0"),
        (op::LINK, link.as_slice(), b"new\0"),
        (op::SYMLINK, &[], b"new\0target\0"),
    ];
    let send = |(opcode, fixed, names)| guest.call_raw(opcode, ROOT, &[fixed, names], reply_size);
    requests.map(send).into_iter().filter_map(|reply| reply.unwrap().err()).collect()
}

#[test]
fn nothing_is_created_that_the_guest_cannot_be_told_of() {
    let mut guest = guest_with_limits(2, 3, 16);
    let open: Vec<u64> = (0..2).map(|i| guest.walk(&[&name(i)]).unwrap()).collect();
    assert_eq!(create_each(&mut guest, open[0], 100), [Errno::INVAL; 5], "the reply would not fit");
    for &node in &open {
        guest.open(node, READ).unwrap();
    }
    assert_eq!(create_each(&mut guest, open[0], REPLY_SIZE), [Errno::NFILE; 5], "no node can be evicted");
    assert_eq!(fs::read_dir(guest.path("")).unwrap().count(), 2);
}

#[test]
fn the_root_is_never_forgotten() {
    let mut guest = guest_with_limits(1, 10, 16);
    let many: Vec<u8> = [ROOT, 99, 0]
        .iter()
        .flat_map(|&nodeid| ForgetOne { nodeid, nlookup: u64::MAX }.as_slice().to_vec())
        .collect();
    for count in [3, u32::MAX] {
        let input = BatchForgetIn { count, padding: 0 };
        assert!(guest.call_raw(op::BATCH_FORGET, 0, &[input.as_slice(), &many], 0).is_none());
    }
    forget(&mut guest, ROOT, 1);
    assert!(guest.walk(&[c"0"]).is_ok());
}

#[test]
fn inode_numbers_of_other_devices_are_made_distinct() {
    let mut guest = guest_with_limits(1, 10, 16);
    let nodes = &mut guest.share.server.nodes;
    let own = fs::metadata(guest.dir.path().join("share")).unwrap().dev();
    let own = (rustix::fs::major(own), rustix::fs::minor(own));
    assert_eq!(nodes.guest_inode(own, 5), 5);
    assert_eq!(nodes.guest_inode((1000, 1), 5), 5 + (1 << 48));
    assert_eq!(nodes.guest_inode((1000, 2), 5), 5 + (2 << 48));
    assert_eq!(nodes.guest_inode((1000, 1), 6), 6 + (1 << 48));
}
