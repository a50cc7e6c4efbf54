//! Random requests. The server must not crash, must reply in valid FUSE, and must not read or change anything outside
//! of the share. It must not change a read-only share either.

use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use super::*;

const SECRET: &[u8] = b"the canary's own words";

fn guest(access: Access) -> Guest {
    let guest = Guest::with_files(access, |share| {
        fs::create_dir_all(share.join("folder/deep")).unwrap();
        fs::write(share.join("file"), "inside").unwrap();
        fs::write(share.join("folder/other"), "inside too").unwrap();
        symlink("../canary", share.join("link")).unwrap();
        symlink("..", share.join("up")).unwrap();
        symlink("/", share.join("root")).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, share.join("pipe"), rustix::fs::FileType::Fifo, 0o600.into(), 0)
            .unwrap();
    });
    fs::write(guest.dir.path().join("canary"), SECRET).unwrap();
    guest
}

/// Collects the attributes and contents of a directory tree, except for the directory `without`.
fn tree(at: &Path, without: Option<&Path>, seen: &mut BTreeMap<PathBuf, (u32, u64, i64, i64, Vec<u8>)>) {
    for entry in fs::read_dir(at).unwrap() {
        let path = entry.unwrap().path();
        if Some(path.as_path()) == without {
            continue;
        }
        let meta = fs::symlink_metadata(&path).unwrap();
        let content = match meta.file_type() {
            kind if kind.is_file() => fs::read(&path).unwrap(),
            kind if kind.is_symlink() => fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes(),
            _ => vec![],
        };
        seen.insert(path.clone(), (meta.mode(), meta.nlink(), meta.mtime_nsec(), meta.ctime_nsec(), content));
        if meta.is_dir() {
            tree(&path, without, seen);
        }
    }
}

fn snapshot(at: &Path, without: Option<&Path>) -> BTreeMap<PathBuf, (u32, u64, i64, i64, Vec<u8>)> {
    let mut seen = BTreeMap::new();
    tree(at, without, &mut seen);
    seen
}

#[derive(Debug, Clone)]
struct Request {
    header: InHeader,
    body: Vec<u8>,
    reply_size: usize,
}

/// Node IDs and handles that exist or almost exist, and others.
fn word() -> impl Strategy<Value = u64> {
    prop_oneof![8 => 0_u64..12, 1 => any::<u64>(), 1 => select(vec![u64::MAX, 1 << 63, 1 << 62, 4096, 0xffff_ffff])]
}

fn name() -> impl Strategy<Value = Vec<u8>> {
    let known: Vec<&[u8]> = vec![
        b"file\0",
        b"folder\0",
        b"deep\0",
        b"other\0",
        b"link\0",
        b"up\0",
        b"root\0",
        b"pipe\0",
        b"new\0",
        b"..\0",
        b".\0",
        b"\0",
        b"../canary\0",
        b"/etc/passwd\0",
        b"canary\0",
        b"share\0",
        b"folder/other\0",
    ];
    prop_oneof![
        12 => select(known).prop_map(<[u8]>::to_vec),
        1 => vec(any::<u8>(), 0..300),
        1 => Just([vec![b'x'; 256], vec![0]].concat()),
    ]
}

/// Returns the number of 64-bit words that precede the names in a request, so that many random requests are valid.
fn fixed_words(opcode: u32) -> usize {
    match opcode {
        op::LOOKUP | op::SYMLINK | op::UNLINK | op::RMDIR => 0,
        op::MKDIR | op::RENAME | op::LINK => 1,
        op::MKNOD | op::RENAME2 | op::CREATE => 2,
        op::READ | op::WRITE | op::READDIR | op::READDIRPLUS => 5,
        op::SETATTR => 11,
        _ => 4,
    }
}

fn request() -> impl Strategy<Value = Request> {
    let opcode = prop_oneof![30 => 0_u32..55, 1 => any::<u32>()];
    let parts = (opcode, word(), vec(word(), 11), vec(name(), 0..3), any::<u64>());
    let cut = prop_oneof![9 => Just(usize::MAX), 1 => 0_usize..100];
    let len = prop_oneof![19 => Just(None), 1 => any::<u32>().prop_map(Some)];
    let reply_size = prop_oneof![8 => Just(REPLY_SIZE), 1 => select(vec![0, 1, 15, 16, 17, 100, 160, 4096])];
    (parts, cut, len, reply_size).prop_map(
        |((opcode, nodeid, words, names, unique), cut, len, reply_size)| {
            let mut body: Vec<u8> = words[..fixed_words(opcode)]
                .iter()
                .flat_map(|word| word.to_ne_bytes())
                .chain(names.concat())
                .collect();
            body.truncate(cut);
            let len = len.unwrap_or(u32::try_from(size_of::<InHeader>() + body.len()).unwrap());
            Request {
                header: InHeader { len, opcode, unique, nodeid, ..InHeader::default() },
                body,
                reply_size,
            }
        },
    )
}

fn send(guest: &mut Guest, request: &Request) {
    let bytes = [request.header.as_slice(), &request.body].concat();
    let reply = guest.share.serve(&bytes, request.reply_size);
    if let Some(Ok(body)) = decode_reply(reply, request.header.unique, request.reply_size) {
        assert!(!body.windows(SECRET.len()).any(|bytes| bytes == SECRET), "{request:?} read the canary");
    }
}

/// Looks up nodes 2 to 8, and opens handles 1 to 5 (1 to 3 if the share is read-only).
fn begin(guest: &mut Guest, access: Access) {
    for name in [c"file", c"folder", c"link", c"up", c"root", c"pipe"] {
        guest.walk(&[name]).unwrap();
    }
    guest.walk(&[c"folder", c"other"]).unwrap();
    guest.open(2, READ).unwrap();
    guest.open_directory(ROOT).unwrap();
    guest.open_directory(3).unwrap();
    if access == Access::ReadWrite {
        guest.open(2, READ_WRITE).unwrap();
        guest.open(8, WRITE).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_request_leads_out_of_a_share(requests in vec(request(), 1..300)) {
        let mut guest = guest(Access::ReadWrite);
        // The share itself is not compared: the guest may have removed the permissions to read it.
        let share = guest.dir.path().join("share");
        let outside = |guest: &Guest| snapshot(guest.dir.path(), Some(&share));
        let before = outside(&guest);
        begin(&mut guest, Access::ReadWrite);
        for request in &requests {
            send(&mut guest, request);
        }
        prop_assert_eq!(outside(&guest), before);
        // The server still works.
        prop_assert!(guest.attributes(ROOT).is_ok());
    }

    #[test]
    fn no_request_changes_a_read_only_share(requests in vec(request(), 1..300)) {
        let mut guest = guest(Access::ReadOnly);
        let before = snapshot(guest.dir.path(), None);
        begin(&mut guest, Access::ReadOnly);
        for request in &requests {
            send(&mut guest, request);
        }
        prop_assert_eq!(snapshot(guest.dir.path(), None), before);
        prop_assert!(guest.attributes(ROOT).is_ok());
    }

    #[test]
    fn replies_to_random_bytes_fit(bytes in vec(any::<u8>(), 0..200), reply_size in 0_usize..200) {
        let mut guest = guest(Access::ReadOnly);
        prop_assert!(guest.share.serve(&bytes, reply_size).len() <= reply_size);
    }
}
