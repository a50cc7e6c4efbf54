//! A FUSE client for tests, and tests with it. [`hostile`] sends random requests, [`moves`] lets the host rename
//! directories meanwhile, and [`kernel`] uses a real kernel as the client.

use std::ffi::CStr;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::PathBuf;

use rustix::mount::{UnmountFlags, unmount};
use tempfile::TempDir;

use super::wire::*;
use super::*;

mod hostile;
mod kernel;
mod limits;
mod mounts;
mod moves;
mod reading;
mod roots;
mod saved;
mod writing;

const REPLY_SIZE: usize = MAX_TRANSFER + PAGE;
const READ: u32 = 0;
const WRITE: u32 = 1;
const READ_WRITE: u32 = 2;

/// A FUSE client. `dir` contains the shared directory `share`, and the file `canary` outside of the share.
struct Guest {
    share: Share,
    unique: u64,
    dir: TempDir,
}

/// Leaves nothing out of a share.
#[expect(clippy::unnecessary_wraps, reason = "what leaves something out may fail")]
fn everything(_: &PathFd) -> Result<View, Errno> {
    Ok(View::of_everything())
}

/// The reply to a lookup.
type Entry = EntryOut;
/// A directory entry: name, header, and the lookup that READDIRPLUS adds.
type Listed = (Vec<u8>, Dirent, Option<Entry>);

impl Guest {
    fn new(access: Access) -> Self {
        Self::with_files(access, |_| {})
    }

    fn with_files(access: Access, make: impl FnOnce(&Path)) -> Self {
        let dir = TempDir::new().unwrap();
        fs::create_dir(dir.path().join("share")).unwrap();
        fs::write(dir.path().join("canary"), "outside").unwrap();
        make(&dir.path().join("share"));
        let share = Share::open(&dir.path().join("share"), access, 1).unwrap();
        Self { share, unique: 0, dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join("share").join(name)
    }

    /// Sends a request. Returns the body or the error of the reply, if there is a reply.
    fn call_raw(
        &mut self,
        opcode: u32,
        nodeid: u64,
        parts: &[&[u8]],
        reply_size: usize,
    ) -> Option<Result<Vec<u8>, Errno>> {
        self.unique += 1;
        let body = parts.concat();
        let len = u32::try_from(size_of::<InHeader>() + body.len()).unwrap();
        let header = InHeader { len, opcode, unique: self.unique, nodeid, ..InHeader::default() };
        let request = [header.as_slice(), &body].concat();
        let unique = self.unique;
        decode_reply(self.share.serve(&request, reply_size), unique, reply_size)
    }

    fn call(&mut self, opcode: u32, nodeid: u64, parts: &[&[u8]]) -> Result<Vec<u8>, Errno> {
        self.call_raw(opcode, nodeid, parts, REPLY_SIZE).expect("a reply")
    }

    fn look_up(&mut self, parent: u64, name: &CStr) -> Result<Entry, Errno> {
        self.call(op::LOOKUP, parent, &[name.to_bytes_with_nul()]).map(|reply| decode(&reply))
    }

    /// Looks up a path. Returns the node ID of its last component.
    fn walk(&mut self, path: &[&CStr]) -> Result<u64, Errno> {
        path.iter().try_fold(ROOT, |at, name| self.look_up(at, name).map(|entry| entry.nodeid))
    }

    fn attributes(&mut self, node: u64) -> Result<Attr, Errno> {
        let reply = self.call(op::GETATTR, node, &[GetattrIn::default().as_slice()])?;
        Ok(decode::<AttrOut>(&reply).attr)
    }

    fn set(&mut self, node: u64, what: SetattrIn) -> Result<Attr, Errno> {
        self.call(op::SETATTR, node, &[what.as_slice()]).map(|reply| decode::<AttrOut>(&reply).attr)
    }

    fn open(&mut self, node: u64, flags: u32) -> Result<u64, Errno> {
        let reply = self.call(op::OPEN, node, &[OpenIn { flags, open_flags: 0 }.as_slice()])?;
        Ok(decode::<OpenOut>(&reply).fh)
    }

    fn create(&mut self, parent: u64, name: &CStr, flags: u32, mode: u32) -> Result<(Entry, u64), Errno> {
        let input = CreateIn { flags, mode, ..CreateIn::default() };
        let reply = self.call(op::CREATE, parent, &[input.as_slice(), name.to_bytes_with_nul()])?;
        let (entry, open) = reply.split_at(size_of::<EntryOut>());
        Ok((decode(entry), decode::<OpenOut>(open).fh))
    }

    fn read(&mut self, node: u64, fh: u64, offset: u64, size: u32) -> Result<Vec<u8>, Errno> {
        self.call(op::READ, node, &[ReadIn { fh, offset, size, ..ReadIn::default() }.as_slice()])
    }

    fn write(&mut self, node: u64, fh: u64, offset: u64, data: &[u8]) -> Result<u32, Errno> {
        self.write_as(node, WriteIn { fh, offset, ..WriteIn::default() }, data)
    }

    fn write_as(&mut self, node: u64, input: WriteIn, data: &[u8]) -> Result<u32, Errno> {
        let input = WriteIn { size: u32::try_from(data.len()).unwrap(), ..input };
        self.call(op::WRITE, node, &[input.as_slice(), data]).map(|reply| decode::<WriteOut>(&reply).size)
    }

    fn release(&mut self, node: u64, fh: u64) -> Result<(), Errno> {
        self.call(op::RELEASE, node, &[ReleaseIn { fh, ..ReleaseIn::default() }.as_slice()]).map(drop)
    }

    fn open_directory(&mut self, node: u64) -> Result<u64, Errno> {
        let reply = self.call(op::OPENDIR, node, &[OpenIn::default().as_slice()])?;
        Ok(decode::<OpenOut>(&reply).fh)
    }

    /// Opens a directory and returns all its entries, read with READDIR or READDIRPLUS in replies of `size` bytes.
    fn list(&mut self, node: u64, opcode: u32, size: u32) -> Result<Vec<Listed>, Errno> {
        let fh = self.open_directory(node)?;
        let entries = self.read_directory(node, fh, opcode, size);
        self.call(op::RELEASEDIR, node, &[ReleaseIn { fh, ..ReleaseIn::default() }.as_slice()])?;
        entries
    }

    fn read_directory(&mut self, node: u64, fh: u64, opcode: u32, size: u32) -> Result<Vec<Listed>, Errno> {
        let mut entries = Vec::new();
        let mut offset = 0;
        loop {
            let input = ReadIn { fh, offset, size, ..ReadIn::default() };
            let reply = self.call(opcode, node, &[input.as_slice()])?;
            assert!(reply.len() <= size as usize);
            if reply.is_empty() {
                return Ok(entries);
            }
            let mut body = Body(&reply);
            while !body.0.is_empty() {
                let found = (opcode == op::READDIRPLUS).then(|| body.take().unwrap());
                let dirent: Dirent = body.take().unwrap();
                let len = dirent.namelen as usize;
                let name = body.bytes(len.next_multiple_of(8)).unwrap()[..len].to_vec();
                offset = dirent.off;
                entries.push((name, dirent, found));
            }
        }
    }
}

fn decode<T: ByteValued + Default>(bytes: &[u8]) -> T {
    let mut body = Body(bytes);
    let object = body.take().unwrap();
    assert!(body.0.is_empty(), "{} bytes too many", body.0.len());
    object
}

/// Returns the body or the error of a reply, or `None` if the reply is empty. Checks its header and length.
fn decode_reply(reply: &[u8], unique: u64, reply_size: usize) -> Option<Result<Vec<u8>, Errno>> {
    assert!(reply.len() <= reply_size);
    if reply.is_empty() {
        return None;
    }
    let (header, body) = reply.split_at(size_of::<OutHeader>());
    let header: OutHeader = decode(header);
    assert_eq!((header.len as usize, header.unique), (reply.len(), unique));
    if header.error == 0 {
        return Some(Ok(body.to_vec()));
    }
    assert!((-4095..0).contains(&header.error), "{}", header.error);
    assert!(body.is_empty());
    Some(Err(Errno::from_raw_os_error(-header.error)))
}

#[test]
fn a_directory_that_cannot_be_shared_is_reported_in_one_line() {
    let dir = TempDir::new().unwrap();
    let error = |path: &Path| Share::open(path, Access::ReadOnly, 1).unwrap_err().to_string();
    let at = dir.path().display();
    assert_eq!(error(&dir.path().join("none")), format!("--share {at}/none: no such directory"));
    fs::write(dir.path().join("file"), "").unwrap();
    assert_eq!(error(&dir.path().join("file")), format!("--share {at}/file: not a directory"));
    assert_eq!(
        error(Path::new("/proc/self")),
        "--share /proc/self: the kernel's process table cannot be shared"
    );
}

#[test]
fn a_share_may_be_named_by_a_symbolic_link() {
    let guest = Guest::new(Access::ReadOnly);
    symlink(guest.path(""), guest.dir.path().join("link")).unwrap();
    assert!(Share::open(&guest.dir.path().join("link"), Access::ReadOnly, 1).is_ok());
}

#[test]
fn mounting_negotiates_requests_of_a_mebibyte() {
    let mut guest = Guest::new(Access::ReadOnly);
    let input = InitIn { major: 7, minor: 45, max_readahead: 131_072, flags: u32::MAX };
    let reply = guest.call(op::INIT, 0, &[input.as_slice(), &[0; 48]]).unwrap();
    let reply: InitOut = decode(&reply);
    assert_eq!((reply.major, reply.minor, reply.max_readahead), (7, 31, 131_072));
    assert_eq!((reply.max_write, reply.max_pages), (1 << 20, 256));
    assert_ne!(reply.flags & init::AUTO_INVAL_DATA, 0);
    // Locks, POSIX ACLs, DAX and the write-back cache are not offered. The write-back cache would hide changes by the
    // host.
    for bit in [1, 10, 16, 20, 26] {
        assert_eq!(reply.flags & 1 << bit, 0);
    }
    let old = InitIn { minor: 30, ..input };
    assert_eq!(guest.call(op::INIT, 0, &[old.as_slice()]), Err(Errno::PROTO));
}

#[test]
fn mounting_again_closes_all_handles_and_forgets_all_inodes() {
    for opcode in [op::INIT, op::DESTROY] {
        let mut guest =
            Guest::with_files(Access::ReadOnly, |share| fs::write(share.join("file"), "x").unwrap());
        let node = guest.walk(&[c"file"]).unwrap();
        let fh = guest.open(node, READ).unwrap();
        guest.call(opcode, 0, &[InitIn { major: 7, minor: 31, ..InitIn::default() }.as_slice()]).unwrap();
        assert_eq!(guest.attributes(node), Err(Errno::STALE));
        assert_eq!(guest.read(node, fh, 0, 1), Err(Errno::BADF));
        assert!(guest.attributes(ROOT).is_ok());
        assert_ne!(guest.walk(&[c"file"]).unwrap(), node);
    }
}

#[test]
fn unsupported_requests_fail_with_enosys() {
    let mut guest = Guest::new(Access::ReadWrite);
    // SETXATTR, GETXATTR, LISTXATTR, FLUSH, GETLK, IOCTL, POLL, COPY_FILE_RANGE, SETUPMAPPING, TMPFILE.
    for opcode in [21, 22, 23, 25, 31, 39, 40, 47, 48, 51, 0, 4096, u32::MAX] {
        assert_eq!(guest.call(opcode, ROOT, &[&[0; 64]]), Err(Errno::NOSYS));
    }
}

/// A mount, which needs root. Unmounts when dropped, which must happen before the directory around it is removed.
struct Mount(PathBuf);

impl Mount {
    fn new(at: PathBuf, mount: impl FnOnce(&Path) -> rustix::io::Result<()>) -> Option<Self> {
        if mount(&at).is_err() {
            eprintln!("not tested: this user cannot mount");
            return None;
        }
        Some(Self(at))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        unmount(&self.0, UnmountFlags::DETACH).unwrap();
    }
}
