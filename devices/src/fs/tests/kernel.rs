//! A real kernel as the client: the kernel of this machine mounts the share through `/dev/fuse`, which uses the same
//! protocol.
//!
//! These tests need root and a kernel with FUSE. Otherwise they print a note and do nothing. The tests of the whole
//! program use virtio-fs in a guest.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::process::Command;
use std::thread::JoinHandle;

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use super::*;

/// A mounted share, and the thread that serves it.
struct Mounted {
    dir: TempDir,
    server: Option<JoinHandle<()>>,
}

impl Mounted {
    fn new(access: Access, make: impl FnOnce(&Path)) -> Option<Self> {
        Self::with_share(make, |share| Share::open(share, access, 1).unwrap())
    }

    fn with_share(make: impl FnOnce(&Path), serve: impl FnOnce(&Path) -> Share) -> Option<Self> {
        let mounted = Self::mount(make, serve);
        if mounted.is_none() {
            eprintln!("not tested: this user cannot mount FUSE file systems here");
        }
        mounted
    }

    fn mount(make: impl FnOnce(&Path), serve: impl FnOnce(&Path) -> Share) -> Option<Self> {
        let mut device = OpenOptions::new().read(true).write(true).open("/dev/fuse").ok()?;
        let dir = TempDir::new().unwrap();
        for name in ["share", "mount"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        make(&dir.path().join("share"));
        let mut share = serve(&dir.path().join("share"));
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other",
            device.as_raw_fd()
        );
        let options = std::ffi::CString::new(options).unwrap();
        mount("tally", dir.path().join("mount"), "fuse", MountFlags::NOSUID | MountFlags::NODEV, &*options)
            .ok()?;
        let server = std::thread::spawn(move || {
            let mut request = vec![0; Share::MAX_REQUEST];
            // Reading fails once the share is unmounted.
            while let Ok(len) = device.read(&mut request) {
                let reply = share.serve(&request[..len], REPLY_SIZE);
                if !reply.is_empty() {
                    // Fails if the requesting process has been killed.
                    let _ = device.write(reply);
                }
            }
        });
        Some(Self { dir, server: Some(server) })
    }

    fn host(&self, name: &str) -> PathBuf {
        self.dir.path().join("share").join(name)
    }

    fn guest(&self, name: &str) -> PathBuf {
        self.dir.path().join("mount").join(name)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        unmount(self.dir.path().join("mount"), UnmountFlags::DETACH).unwrap();
        let ended = self.server.take().unwrap().join();
        assert!(ended.is_ok() || std::thread::panicking());
    }
}

#[test]
fn common_file_operations_work_in_a_share() {
    let Some(share) = Mounted::new(Access::ReadWrite, |_| {}) else { return };
    let script = r#"
        set -e
        cp /bin/true ./program && ./program
        mkdir -p a/b/c && echo one >a/b/c/file && echo two >>a/b/c/file && mv a/b/c/file a/file
        test "$(cat a/file)" = "one
two"
        ln -s a/file link && test "$(cat link)" = "$(cat a/file)" && ln a/file hard
        test "$(stat -c %h hard)" = 2 && test "$(stat -c %u hard)" = 0
        chmod 600 hard && test "$(stat -c %a a/file)" = 600
        mkfifo pipe && (echo through >pipe &) && test "$(cat pipe)" = through
        dd if=/dev/zero of=zeros bs=1M count=3 2>/dev/null && truncate -s 5000000 zeros && test "$(stat -c %s zeros)" = 5000000
        fallocate -l 6000000 zeros && test "$(stat -c %s zeros)" = 6000000
        touch -d @12345 zeros && test "$(stat -c %Y zeros)" = 12345
        tar -c --owner=0 . | tar -t >/dev/null
        rm -r a && test "$(cat hard)" = "one
two" && ! test -e link
        mknod null c 1 3 && exit 1
        chown 1 hard 2>/dev/null && exit 1
        cd .. && ls mount >/dev/null
    "#;
    let done = Command::new("sh").args(["-c", script]).current_dir(share.guest("")).output().unwrap();
    assert!(done.status.success(), "{done:?}");
    assert_eq!(fs::read(share.host("hard")).unwrap(), b"one\ntwo\n");
    assert_eq!(fs::metadata(share.host("program")).unwrap().len(), fs::metadata("/bin/true").unwrap().len());
}

#[test]
fn a_kernel_lists_ten_thousand_files() {
    let make = |share: &Path| {
        for i in 0..10_000 {
            fs::write(share.join(i.to_string()), "").unwrap();
        }
    };
    let Some(share) = Mounted::new(Access::ReadOnly, make) else { return };
    let sizes = fs::read_dir(share.guest("")).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len());
    assert_eq!(sizes.map(|size| size + 1).sum::<u64>(), 10_000);
}

#[test]
fn a_kernel_works_in_a_tree_of_more_inodes_than_are_remembered() {
    let make = |share: &Path| {
        for directory in 0..60 {
            fs::create_dir_all(share.join(format!("{directory}/a/b"))).unwrap();
            for file in 0..20 {
                fs::write(share.join(format!("{directory}/a/b/{file}")), "x").unwrap();
            }
        }
    };
    let limits = Limits { nodes: 400, descriptors: 16, ..MEMORY };
    let serve = |share: &Path| Share::with_limits(share, Access::ReadWrite, everything, limits).unwrap();
    let Some(share) = Mounted::with_share(make, serve) else { return };
    let script = r"
        set -e
        cd 7/a
        for i in 1 2; do
            test $(find ../.. -type f | wc -l) = 1200
            test $(cat ../../*/a/b/* | wc -c) = 1200
            test $(cat b/* | wc -c) = 20
        done
        cp -r ../../8 ../../new && rm -r ../../9 && test $(find ../.. -type f | wc -l) = 1200
        tar -C ../.. -c . | tar -t | wc -l
    ";
    let done = Command::new("sh").args(["-c", script]).current_dir(share.guest("")).output().unwrap();
    assert!(done.status.success() && done.stderr.is_empty(), "{done:?}");
}

#[test]
fn a_kernel_sees_changes_by_the_host_within_a_second() {
    let Some(share) = Mounted::new(Access::ReadOnly, |share| fs::write(share.join("file"), "one").unwrap())
    else {
        return;
    };
    let mut open = File::open(share.guest("file")).unwrap();
    let mut text = String::new();
    open.read_to_string(&mut text).unwrap();
    for content in ["two", "and longer", ""] {
        fs::write(share.host("file"), content).unwrap();
        // Cached attributes are valid for one second.
        std::thread::sleep(std::time::Duration::from_millis(1100));
        assert_eq!(fs::read_to_string(share.guest("file")).unwrap(), content);
        text.clear();
        open.seek(SeekFrom::Start(0)).unwrap();
        open.read_to_string(&mut text).unwrap();
        assert_eq!(text, content, "through the open file");
    }
}

#[test]
fn a_kernel_cannot_write_to_a_read_only_share() {
    let Some(share) = Mounted::new(Access::ReadOnly, |share| fs::write(share.join("file"), "one").unwrap())
    else {
        return;
    };
    let kind = std::io::ErrorKind::ReadOnlyFilesystem;
    assert_eq!(fs::write(share.guest("file"), "two").unwrap_err().kind(), kind);
    assert_eq!(fs::write(share.guest("new"), "two").unwrap_err().kind(), kind);
    assert_eq!(fs::remove_file(share.guest("file")).unwrap_err().kind(), kind);
    assert_eq!(fs::rename(share.guest("file"), share.guest("other")).unwrap_err().kind(), kind);
    assert_eq!(fs::read(share.host("file")).unwrap(), b"one");
}

#[test]
fn an_unlinked_file_can_be_written_and_read() {
    let Some(share) = Mounted::new(Access::ReadWrite, |_| {}) else { return };
    let path = share.guest("temporary");
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path).unwrap();
    fs::remove_file(&path).unwrap();
    file.write_all_at(b"kept", 100_000).unwrap();
    let mut bytes = [0; 4];
    file.read_exact_at(&mut bytes, 100_000).unwrap();
    assert_eq!((&bytes, file.metadata().unwrap().len()), (b"kept", 100_004));
    assert_eq!(fs::read_dir(share.host("")).unwrap().count(), 0);
}
