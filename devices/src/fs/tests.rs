//! A guest that speaks FUSE to a share, and tests of what it sees. Where it is hostile: [`hostile`]; where the host moves
//! things under it: [`moves`]; where it is a real kernel: [`kernel`].

use std::ffi::CStr;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::PathBuf;

use tempfile::TempDir;

use super::wire::*;
use super::*;

mod hostile;
mod kernel;
mod limits;
mod mounts;
mod moves;
mod reading;
mod writing;

const ROOM: usize = MOST + PAGE;
const READ: u32 = 0;
const WRITE: u32 = 1;
const READ_WRITE: u32 = 2;

/// A folder with a share in it, and a canary beside that.
struct Guest {
    share: Share,
    unique: u64,
    dir: TempDir,
}

/// What an answer to a lookup says, and the handle that CREATE adds to it.
type Entry = EntryOut;
/// A name in a folder, what is said with it, and what READDIRPLUS adds.
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

    /// Sends a request, and takes its answer apart.
    fn ask_raw(
        &mut self,
        opcode: u32,
        nodeid: u64,
        parts: &[&[u8]],
        room: usize,
    ) -> Option<Result<Vec<u8>, Errno>> {
        self.unique += 1;
        let body = parts.concat();
        let len = u32::try_from(size_of::<InHeader>() + body.len()).unwrap();
        let header = InHeader { len, opcode, unique: self.unique, nodeid, ..InHeader::default() };
        let request = [header.as_slice(), &body].concat();
        let unique = self.unique;
        well_formed(self.share.serve(&request, room), unique, room)
    }

    fn ask(&mut self, opcode: u32, nodeid: u64, parts: &[&[u8]]) -> Result<Vec<u8>, Errno> {
        self.ask_raw(opcode, nodeid, parts, ROOM).expect("an answer")
    }

    fn look_up(&mut self, folder: u64, name: &CStr) -> Result<Entry, Errno> {
        self.ask(op::LOOKUP, folder, &[name.to_bytes_with_nul()]).map(|answer| object(&answer))
    }

    /// The number of what is at the end of a path of names.
    fn walk(&mut self, path: &[&CStr]) -> Result<u64, Errno> {
        path.iter().try_fold(ROOT, |at, name| self.look_up(at, name).map(|entry| entry.nodeid))
    }

    fn attributes(&mut self, node: u64) -> Result<Attr, Errno> {
        let answer = self.ask(op::GETATTR, node, &[GetattrIn::default().as_slice()])?;
        Ok(object::<AttrOut>(&answer).attr)
    }

    fn set(&mut self, node: u64, what: SetattrIn) -> Result<Attr, Errno> {
        self.ask(op::SETATTR, node, &[what.as_slice()]).map(|answer| object::<AttrOut>(&answer).attr)
    }

    fn open(&mut self, node: u64, flags: u32) -> Result<u64, Errno> {
        let answer = self.ask(op::OPEN, node, &[OpenIn { flags, open_flags: 0 }.as_slice()])?;
        Ok(object::<OpenOut>(&answer).fh)
    }

    fn create(&mut self, folder: u64, name: &CStr, flags: u32, mode: u32) -> Result<(Entry, u64), Errno> {
        let input = CreateIn { flags, mode, ..CreateIn::default() };
        let answer = self.ask(op::CREATE, folder, &[input.as_slice(), name.to_bytes_with_nul()])?;
        let (entry, open) = answer.split_at(size_of::<EntryOut>());
        Ok((object(entry), object::<OpenOut>(open).fh))
    }

    fn read(&mut self, node: u64, fh: u64, offset: u64, size: u32) -> Result<Vec<u8>, Errno> {
        self.ask(op::READ, node, &[ReadIn { fh, offset, size, ..ReadIn::default() }.as_slice()])
    }

    fn write(&mut self, node: u64, fh: u64, offset: u64, data: &[u8]) -> Result<u32, Errno> {
        self.write_as(node, WriteIn { fh, offset, ..WriteIn::default() }, data)
    }

    fn write_as(&mut self, node: u64, input: WriteIn, data: &[u8]) -> Result<u32, Errno> {
        let input = WriteIn { size: u32::try_from(data.len()).unwrap(), ..input };
        self.ask(op::WRITE, node, &[input.as_slice(), data]).map(|answer| object::<WriteOut>(&answer).size)
    }

    fn release(&mut self, node: u64, fh: u64) -> Result<(), Errno> {
        self.ask(op::RELEASE, node, &[ReleaseIn { fh, ..ReleaseIn::default() }.as_slice()]).map(drop)
    }

    fn open_folder(&mut self, node: u64) -> Result<u64, Errno> {
        let answer = self.ask(op::OPENDIR, node, &[OpenIn::default().as_slice()])?;
        Ok(object::<OpenOut>(&answer).fh)
    }

    /// All entries of a folder, read in answers of that size; with READDIRPLUS, and as what they were looked up.
    fn list(&mut self, node: u64, opcode: u32, size: u32) -> Result<Vec<Listed>, Errno> {
        let fh = self.open_folder(node)?;
        let entries = self.read_folder(node, fh, opcode, size);
        self.ask(op::RELEASEDIR, node, &[ReleaseIn { fh, ..ReleaseIn::default() }.as_slice()])?;
        entries
    }

    fn read_folder(&mut self, node: u64, fh: u64, opcode: u32, size: u32) -> Result<Vec<Listed>, Errno> {
        let mut entries = Vec::new();
        let mut offset = 0;
        loop {
            let input = ReadIn { fh, offset, size, ..ReadIn::default() };
            let answer = self.ask(opcode, node, &[input.as_slice()])?;
            assert!(answer.len() <= size as usize);
            if answer.is_empty() {
                return Ok(entries);
            }
            let mut body = Body(&answer);
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

fn object<T: ByteValued + Default>(bytes: &[u8]) -> T {
    let mut body = Body(bytes);
    let object = body.take().unwrap();
    assert!(body.0.is_empty(), "{} bytes too many", body.0.len());
    object
}

/// An answer's body or error, if there is an answer; which must be one to that request, and fit.
fn well_formed(answer: &[u8], unique: u64, room: usize) -> Option<Result<Vec<u8>, Errno>> {
    assert!(answer.len() <= room);
    if answer.is_empty() {
        return None;
    }
    let (header, body) = answer.split_at(size_of::<OutHeader>());
    let header: OutHeader = object(header);
    assert_eq!((header.len as usize, header.unique), (answer.len(), unique));
    if header.error == 0 {
        return Some(Ok(body.to_vec()));
    }
    assert!((-4095..0).contains(&header.error), "{}", header.error);
    assert!(body.is_empty());
    Some(Err(Errno::from_raw_os_error(-header.error)))
}

#[test]
fn what_cannot_be_shared_is_said_in_one_line() {
    let dir = TempDir::new().unwrap();
    let why = |path: &Path| Share::open(path, Access::ReadOnly, 1).unwrap_err().to_string();
    let at = dir.path().display();
    assert_eq!(why(&dir.path().join("none")), format!("--share {at}/none: no such directory"));
    fs::write(dir.path().join("file"), "").unwrap();
    assert_eq!(why(&dir.path().join("file")), format!("--share {at}/file: not a directory"));
    assert_eq!(
        why(Path::new("/proc/self")),
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
fn mounting_agrees_on_requests_of_a_mebibyte() {
    let mut guest = Guest::new(Access::ReadOnly);
    let input = InitIn { major: 7, minor: 45, max_readahead: 131_072, flags: u32::MAX };
    let answer = guest.ask(op::INIT, 0, &[input.as_slice(), &[0; 48]]).unwrap();
    let answer: InitOut = object(&answer);
    assert_eq!((answer.major, answer.minor, answer.max_readahead), (7, 31, 131_072));
    assert_eq!((answer.max_write, answer.max_pages), (1 << 20, 256));
    assert_ne!(answer.flags & init::AUTO_INVAL_DATA, 0);
    // Locks, access lists, DAX, and the write-back cache, which would be stale where the host writes, are not offered.
    for bit in [1, 10, 16, 20, 26] {
        assert_eq!(answer.flags & 1 << bit, 0);
    }
    let old = InitIn { minor: 30, ..input };
    assert_eq!(guest.ask(op::INIT, 0, &[old.as_slice()]), Err(Errno::PROTO));
}

#[test]
fn a_guest_that_mounts_again_has_nothing_open() {
    for opcode in [op::INIT, op::DESTROY] {
        let mut guest =
            Guest::with_files(Access::ReadOnly, |share| fs::write(share.join("file"), "x").unwrap());
        let node = guest.walk(&[c"file"]).unwrap();
        let fh = guest.open(node, READ).unwrap();
        guest.ask(opcode, 0, &[InitIn { major: 7, minor: 31, ..InitIn::default() }.as_slice()]).unwrap();
        assert_eq!(guest.attributes(node), Err(Errno::STALE));
        assert_eq!(guest.read(node, fh, 0, 1), Err(Errno::BADF));
        assert!(guest.attributes(ROOT).is_ok());
        assert_ne!(guest.walk(&[c"file"]).unwrap(), node);
    }
}

#[test]
fn what_is_not_done_is_said_to_be_unknown() {
    let mut guest = Guest::new(Access::ReadWrite);
    // SETXATTR, GETXATTR, LISTXATTR, FLUSH, GETLK, IOCTL, POLL, COPY_FILE_RANGE, SETUPMAPPING, TMPFILE.
    for opcode in [21, 22, 23, 25, 31, 39, 40, 47, 48, 51, 0, 4096, u32::MAX] {
        assert_eq!(guest.ask(opcode, ROOT, &[&[0; 64]]), Err(Errno::NOSYS));
    }
}
