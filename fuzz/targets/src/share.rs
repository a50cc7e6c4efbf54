//! FUSE requests of a guest to a shared folder, while the host renames its files and replaces them by symbolic links
//! that lead out of it. In some inputs a second thread does that at any moment.
//!
//! Beside the share are two files that the guest must not reach. Their text must be in no reply, and their attributes
//! must not change: an access to them would change the time of the last access.

use std::fs::{self, File};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use arbitrary::Arbitrary;
use devices::Access;
use devices::fs::Share;
use rustix::fs::{
    self as sys, CWD, FileType, Mode, OFlags, RenameFlags, ResolveFlags, mknodat, renameat_with,
};
use tempfile::TempDir;

const SECRET: &[u8] = b"the canary's own words";
const FOLDER: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
const HEADER: usize = 40;
const REPLY_HEADER: usize = 16;
const FALLOCATE: u32 = 43;
/// Most bytes that FALLOCATE asks for: the host's disk has an end.
const MAX_ALLOCATED: u64 = 1 << 20;
const REPLY_SIZE: usize = (1 << 20) + 4096;

#[derive(Debug, Arbitrary)]
struct Input {
    is_writable: bool,
    has_few_descriptors: bool,
    host_is_busy: bool,
    steps: Vec<Step>,
}

#[derive(Debug, Arbitrary)]
enum Step {
    /// A request with the fields that its kind has.
    Request { opcode: u8, node: Word, words: [Word; 5], more: u64, names: Vec<Name>, reply: Room },
    /// Any bytes as a request.
    Raw(Vec<u8>, Room),
    /// The host renames or exchanges two of its files.
    Rename { from: Place, to: Place, is_exchange: bool },
    /// The host replaces a file.
    Replace { place: Place, by: Content },
}

/// Node IDs and handles that exist or almost exist, and others.
#[derive(Debug, Clone, Copy, Arbitrary)]
enum Word {
    Small(u8),
    Medium(u32),
    Any(u64),
    Zero,
}

#[derive(Debug, Arbitrary)]
enum Name {
    Known(u8),
    Any(Vec<u8>),
}

const NAMES: [&[u8]; 20] = [
    b"file",
    b"folder",
    b"deep",
    b"other",
    b"link",
    b"up",
    b"root",
    b"pipe",
    b"new",
    b"outside",
    b"..",
    b".",
    b"",
    b"../canary",
    b"/etc/passwd",
    b"canary",
    b"share",
    b"folder/other",
    b"a/../..",
    b"swap",
];

/// Room for the reply.
#[derive(Debug, Clone, Copy, Arbitrary)]
enum Room {
    Enough,
    Some(u8),
}

/// One of the host's paths.
#[derive(Debug, Clone, Copy, Arbitrary)]
struct Place(u8);

const PLACES: [&str; 11] = [
    "file",
    "folder",
    "folder/deep",
    "folder/other",
    "folder/deep/file",
    "link",
    "up",
    "root",
    "pipe",
    "new",
    "swap",
];

#[derive(Debug, Arbitrary)]
enum Content {
    Nothing,
    File,
    Folder,
    Link(u8),
}

const LINKS: [&str; 6] = ["../canary", "..", "/", "../outside", "../../canary", "../outside/other"];

impl Word {
    fn value(self) -> u64 {
        match self {
            Self::Small(value) => u64::from(value % 16),
            Self::Medium(value) => value.into(),
            Self::Any(value) => value,
            Self::Zero => 0,
        }
    }
}

impl Room {
    fn len(self) -> usize {
        match self {
            Self::Enough => REPLY_SIZE,
            Self::Some(len) => len.into(),
        }
    }
}

/// The share and what is beside it.
struct HostFolders {
    dir: TempDir,
}

/// What an access to a file changes: identity, mode, links, size, and times.
type Attributes = (u64, u32, u64, u64, [i64; 6]);

impl HostFolders {
    fn new() -> Self {
        let host = Self { dir: TempDir::new().expect("temporary folders can be made") };
        let make = || {
            fs::create_dir_all(host.path("folder/deep"))?;
            fs::create_dir(host.dir.path().join("outside"))?;
            for file in ["canary", "outside/other", "outside/file"] {
                fs::write(host.dir.path().join(file), SECRET)?;
            }
            fs::write(host.path("file"), "inside")?;
            fs::write(host.path("folder/other"), "inside too")?;
            for (target, link) in [("../canary", "link"), ("..", "up"), ("/", "root"), ("../outside", "swap")]
            {
                symlink(target, host.path(link))?;
            }
            mknodat(CWD, host.path("pipe"), FileType::Fifo, 0o600.into(), 0)?;
            std::io::Result::Ok(())
        };
        make().expect("files can be made");
        host
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join("share").join(name)
    }

    /// Returns a path of the share for the host's own calls, and the folder that has to stay open for it. Returns
    /// `None` if there is no such folder, or a link on the way there: these calls must stay inside, too.
    fn place(&self, Place(number): Place) -> Option<(OwnedFd, PathBuf)> {
        let place = Path::new(PLACES[usize::from(number) % PLACES.len()]);
        let (parent, name) = (place.parent()?, place.file_name()?);
        let share = sys::open(self.path(""), FOLDER, Mode::empty()).ok()?;
        let parent = if parent == Path::new("") { Path::new(".") } else { parent };
        let inside = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let folder = sys::openat2(&share, parent, FOLDER, Mode::empty(), inside).ok()?;
        let path = Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string()).join(name);
        Some((folder, path))
    }

    /// Returns the attributes of what the guest must not reach.
    fn outside(&self) -> Vec<Attributes> {
        let paths = ["canary", "outside", "outside/other", "outside/file", ""];
        let attributes = |path: &&str| {
            let meta = fs::symlink_metadata(self.dir.path().join(path)).expect("it is there");
            // The host's own calls change the last access of folders.
            let read = if meta.is_dir() { [0; 2] } else { [meta.atime(), meta.atime_nsec()] };
            let times = [read[0], read[1], meta.mtime(), meta.mtime_nsec(), meta.ctime(), meta.ctime_nsec()];
            (meta.ino(), meta.mode(), meta.nlink(), meta.size(), times)
        };
        paths.iter().map(attributes).collect()
    }

    /// Returns the number of this process's descriptors of files below the folder.
    fn descriptors(&self) -> usize {
        let open = fs::read_dir("/proc/self/fd").expect("/proc is mounted");
        let targets = open.flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
        targets.filter(|target| target.starts_with(self.dir.path())).count()
    }

    fn rename(&self, from: Place, to: Place, is_exchange: bool) {
        let flags = if is_exchange { RenameFlags::EXCHANGE } else { RenameFlags::empty() };
        if let (Some((_from, from)), Some((_to, to))) = (self.place(from), self.place(to)) {
            // The files may not be there.
            let _ = renameat_with(CWD, from, CWD, to, flags);
        }
    }

    fn replace(&self, place: Place, by: &Content) {
        let Some((_folder, path)) = self.place(place) else { return };
        let is_folder = fs::symlink_metadata(&path).is_ok_and(|meta| meta.is_dir());
        let _ = if is_folder { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        let _ = match by {
            Content::Nothing => Ok(()),
            Content::File => File::create_new(&path).map(drop),
            Content::Folder => fs::create_dir(&path),
            Content::Link(number) => symlink(LINKS[usize::from(*number) % LINKS.len()], &path),
        };
    }
}

/// Returns the number of 64-bit words that precede the names in a request.
fn fixed_words(opcode: u32) -> usize {
    match opcode {
        1 | 6 | 10 | 11 => 0,
        9 | 12 | 13 => 1,
        8 | 35 | 45 => 2,
        15 | 16 | 28 | 44 => 5,
        4 => 11,
        _ => 4,
    }
}

/// Returns a request, or nothing if its answer would be a full disk.
fn request(step: &Step) -> Option<(Vec<u8>, usize)> {
    match step {
        Step::Request { opcode, node, words, more, names, reply } => {
            let opcode = u32::from(*opcode % 56);
            let mut fields: Vec<u64> = words.iter().map(|word| word.value()).collect();
            fields.resize(11, *more);
            if opcode == FALLOCATE {
                fields[1] %= MAX_ALLOCATED;
                fields[2] %= MAX_ALLOCATED;
            }
            let mut body: Vec<u8> =
                fields[..fixed_words(opcode)].iter().flat_map(|field| field.to_ne_bytes()).collect();
            for name in names.iter().take(3) {
                match name {
                    Name::Known(number) => body.extend(NAMES[usize::from(*number) % NAMES.len()]),
                    Name::Any(bytes) => body.extend(bytes),
                }
                body.push(0);
            }
            let len = u32::try_from(HEADER + body.len()).expect("inputs are short");
            let mut bytes = [len, opcode].map(u32::to_ne_bytes).concat();
            bytes.extend([7, node.value()].map(u64::to_ne_bytes).as_flattened());
            bytes.resize(HEADER, 0);
            bytes.extend(body);
            Some((bytes, reply.len()))
        }
        Step::Raw(bytes, reply) => {
            let is_allocation = bytes.get(4..8) == Some(&FALLOCATE.to_ne_bytes());
            (!is_allocation).then(|| (bytes.clone(), reply.len()))
        }
        Step::Rename { .. } | Step::Replace { .. } => None,
    }
}

fn send(share: &mut Share, bytes: &[u8], room: usize) {
    let reply = share.serve(bytes, room);
    assert!(reply.len() <= room, "a reply of {} bytes for {room}", reply.len());
    if reply.is_empty() {
        return;
    }
    let word = |at: usize| u32::from_ne_bytes(*reply[at..].first_chunk().expect("a reply has a header"));
    let error = word(4).cast_signed();
    assert_eq!((word(0) as usize, &reply[8..16]), (reply.len(), &bytes[8..16]));
    assert!((-4095..=0).contains(&error) && (error == 0 || reply.len() == REPLY_HEADER), "{error}");
    assert!(!reply.windows(SECRET.len()).any(|part| part == SECRET), "the canary was read");
}

/// Ends the other thread, also after a panic.
struct SetWhenDropped<'a>(&'a AtomicBool);

impl Drop for SetWhenDropped<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs the target.
pub fn run(data: &[u8]) {
    let Some(input) = crate::parse::<Input>(data) else { return };
    let host = HostFolders::new();
    let access = if input.is_writable { Access::ReadWrite } else { Access::ReadOnly };
    let shares = if input.has_few_descriptors { usize::MAX } else { 1 };
    let mut share = Share::open(&host.path(""), access, shares).expect("the folder can be shared");
    let before = host.outside();
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        if input.host_is_busy {
            // The guest's `folder/other` is a file of the share at one moment, and the canary at the next.
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let _ = renameat_with(
                        CWD,
                        host.path("folder"),
                        CWD,
                        host.path("swap"),
                        RenameFlags::EXCHANGE,
                    );
                }
            });
        }
        let _over = SetWhenDropped(&is_over);
        for step in &input.steps {
            match step {
                Step::Rename { from, to, is_exchange } => host.rename(*from, *to, *is_exchange),
                Step::Replace { place, by } => host.replace(*place, by),
                _ => {
                    if let Some((bytes, room)) = request(step) {
                        send(&mut share, &bytes, room);
                    }
                }
            }
        }
    });
    if input.has_few_descriptors {
        // 8 for inodes, 8 for handles, and the share itself.
        let open = host.descriptors();
        assert!(open <= 17, "{open} descriptors are open");
    }
    assert_eq!(host.outside(), before, "something outside of the share was reached");
}
