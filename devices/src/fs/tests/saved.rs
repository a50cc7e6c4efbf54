//! Snapshots: a restored share is found as it was, by the paths of its inodes.

use proptest::prelude::*;

use super::*;

fn guest(access: Access) -> Guest {
    Guest::with_files(access, |share| {
        fs::create_dir_all(share.join("dir/sub")).unwrap();
        fs::write(share.join("dir/sub/file"), "one two").unwrap();
        fs::write(share.join("other"), "three").unwrap();
    })
}

impl Guest {
    /// Saves the share, and returns the state as a file has it.
    fn save(&mut self) -> Result<ShareState, DeviceError> {
        self.share.save().map(|state| serde_json::from_str(&serde_json::to_string(&state).unwrap()).unwrap())
    }

    /// Replaces the share by another one of the same directory, which is restored.
    fn restore(&mut self, state: &ShareState) -> Result<(), DeviceError> {
        let access = self.share.server.access;
        self.share = Share::open(&self.path(""), access, 1).unwrap();
        self.share.restore(state)
    }
}

#[test]
fn a_restored_guest_goes_on_with_its_inodes_and_open_files() {
    let mut guest = guest(Access::ReadWrite);
    let (file, other) = (guest.walk(&[c"dir", c"sub", c"file"]).unwrap(), guest.walk(&[c"other"]).unwrap());
    let dir = guest.walk(&[c"dir"]).unwrap();
    let (read, write) = (guest.open(file, READ).unwrap(), guest.open(other, READ_WRITE).unwrap());
    let listed = guest.open_directory(dir).unwrap();
    let state = guest.save().unwrap();

    guest.restore(&state).unwrap();
    assert_eq!(guest.read(file, read, 4, 10).unwrap(), b"two");
    assert_eq!(guest.write(other, write, 0, b"T"), Ok(1));
    assert_eq!(guest.write(file, read, 0, b"x"), Err(Errno::BADF), "it was opened for reading");
    let names: Vec<Vec<u8>> = guest
        .read_directory(dir, listed, op::READDIR, 4096)
        .unwrap()
        .into_iter()
        .map(|(name, ..)| name)
        .collect();
    assert!(names.contains(&b"sub".to_vec()), "{names:?}");
    assert_eq!(guest.walk(&[c"dir", c"sub", c"file"]), Ok(file), "an inode keeps its number");
    assert_eq!(fs::read(guest.path("other")).unwrap(), b"Three");
    let new = guest.open(other, READ).unwrap();
    assert!(![read, write, listed].contains(&new), "no handle has the number of another one");
    // The lookups of both are forgotten together.
    let forget = ForgetIn { nlookup: 3 };
    guest.call_raw(op::FORGET, file, &[forget.as_slice()], REPLY_SIZE);
    guest.release(file, read).unwrap();
    assert_eq!(guest.attributes(file), Err(Errno::STALE));
}

#[test]
fn what_is_not_there_is_stale_and_its_number_is_nobody_elses() {
    let mut guest = guest(Access::ReadWrite);
    let file = guest.walk(&[c"dir", c"sub", c"file"]).unwrap();
    let state = guest.save().unwrap();
    fs::rename(guest.path("dir"), guest.path("away")).unwrap();
    fs::write(guest.path("dir"), "a file now").unwrap();
    guest.restore(&state).unwrap();
    assert_eq!(guest.attributes(file), Err(Errno::STALE));
    let found = guest.walk(&[c"away", c"sub", c"file"]).unwrap();
    assert_ne!(found, file);
    assert!(guest.attributes(found).is_ok());
}

#[test]
fn an_open_file_that_has_no_name_is_not_saved() {
    let mut guest = guest(Access::ReadWrite);
    let file = guest.walk(&[c"dir", c"sub", c"file"]).unwrap();
    let fh = guest.open(file, READ).unwrap();
    fs::remove_file(guest.path("dir/sub/file")).unwrap();
    let gone = DeviceError::Nameless("dir/sub/file".into());
    assert_eq!(guest.save(), Err(gone.clone()));
    fs::write(guest.path("dir/sub/file"), "another one").unwrap();
    assert_eq!(guest.save(), Err(gone));
    guest.release(file, fh).unwrap();
    assert!(guest.save().is_ok());
}

#[test]
fn an_open_file_that_is_not_there_is_not_restored() {
    let mut guest = guest(Access::ReadOnly);
    let file = guest.walk(&[c"dir", c"sub", c"file"]).unwrap();
    guest.open(file, READ).unwrap();
    let state = guest.save().unwrap();
    fs::remove_file(guest.path("dir/sub/file")).unwrap();
    let said = guest.restore(&state).unwrap_err().to_string();
    assert!(said.contains("dir/sub/file") && said.contains("No such file"), "{said}");
}

#[test]
fn a_share_that_is_read_only_now_is_not_written_by_a_file_that_was_open() {
    let mut guest = guest(Access::ReadWrite);
    let other = guest.walk(&[c"other"]).unwrap();
    guest.open(other, WRITE).unwrap();
    let state = guest.save().unwrap();
    guest.share.server.access = Access::ReadOnly;
    assert!(matches!(guest.restore(&state), Err(DeviceError::Unopened { .. })));
}

/// A state that a file may have: few numbers, so that they meet.
fn state() -> impl Strategy<Value = ShareState> {
    let name = prop::sample::select(vec!["dir", "sub", "file", "other", "..", ".", "", "a/b", "../canary"]);
    let node = (0..6_u64, 0..6_u64, name, any::<u64>(), 0..3_u64);
    let handle = (1..4_u64, 0..6_u64, prop::option::of(0..4_u32));
    let last = prop_oneof![4 => 0..5_u64, 1 => Just(u64::MAX)];
    let all = (prop::collection::vec(node, 0..8), prop::collection::vec(handle, 0..3), last, 0..3_u64);
    all.prop_map(|(nodes, handles, last_handle, removed)| {
        let nodes: Vec<_> = nodes
            .into_iter()
            .map(|(id, parent, name, lookups, generation)| {
                let id = id | generation << 20;
                serde_json::json!({"id": id, "parent": parent, "name": name.as_bytes(), "lookups": lookups})
            })
            .collect();
        let handles: Vec<_> = handles
            .into_iter()
            .map(|(number, node, mode)| serde_json::json!({"number": number, "node": node, "mode": mode}))
            .collect();
        let nodes = serde_json::json!({"removed": removed, "nodes": nodes});
        let state = serde_json::json!({"nodes": nodes, "handles": handles, "last_handle": last_handle});
        serde_json::from_value(state).unwrap()
    })
}

proptest! {
    #[test]
    fn whatever_a_file_says_nothing_outside_is_found(state in state(), opcode in 0..50_u32) {
        let mut guest = guest(Access::ReadOnly);
        let _ = guest.restore(&state);
        for node in 0..6 {
            for fh in 0..4 {
                if let Ok(text) = guest.read(node, fh, 0, 100) {
                    prop_assert_ne!(text, b"outside".to_vec());
                }
            }
            guest.call_raw(opcode, node, &[&[0; 64]], REPLY_SIZE);
            let _ = guest.look_up(node, c"file");
        }
        let _ = guest.save();
    }
}
