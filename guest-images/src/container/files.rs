//! The files of a saved image: those of a folder, or the members of a tar archive.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use rustix::fs::{Mode, OFlags};
use sha2::{Digest, Sha256};

use crate::cache::Cache;
use crate::decompress;
use crate::progress::Progress;

/// The most bytes that a document about an image has.
const DOCUMENT: u64 = 4 << 20;
/// The most members of an archive.
const MEMBERS: usize = 100_000;
/// The most links that one member leads over. Older archives of docker's have links in place of equal layers.
const LINKS: usize = 8;
/// Time after which a file that changes again has another time of its last change.
const SETTLED: Duration = Duration::from_secs(2);

type Result<T> = std::result::Result<T, String>;

/// A file of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blob {
    pub name: String,
    /// Its digest, if it is known where the file is named.
    pub digest: Option<String>,
}

/// The files of a saved image.
pub enum Files {
    Folder(PathBuf),
    Archive { file: File, members: BTreeMap<PathBuf, Member> },
}

/// A member of an archive.
pub enum Member {
    /// Where its content is, and its length.
    File { offset: u64, size: u64 },
    /// The member with this path has its content.
    Link(PathBuf),
}

impl Files {
    pub fn open(path: &Path, cache: &Cache, progress: &mut Progress) -> Result<Self> {
        if path.is_dir() {
            return Ok(Self::Folder(path.to_owned()));
        }
        let mut file = File::open(path).map_err(|error| error.to_string())?;
        let mut start = [0; 6];
        let read = file.read(&mut start).map_err(|error| error.to_string())?;
        file.rewind().map_err(|error| error.to_string())?;
        if extension(&start[..read]).is_some() {
            progress.step(format!("decompressing {}", path.display()));
            file = decompress_file(file, cache)?;
        }
        let members = members(&mut file)?;
        Ok(Self::Archive { file, members })
    }

    pub fn has(&self, name: &str) -> bool {
        match self {
            Self::Folder(folder) => folder.join(name).is_file(),
            Self::Archive { members, .. } => members.contains_key(Path::new(name)),
        }
    }

    /// Reads a file that is a document, and compares its digest if one is known.
    pub fn document(&mut self, blob: &Blob) -> Result<Vec<u8>> {
        let mut file = self.open_blob(blob)?;
        let bytes = read_small(&mut file, DOCUMENT).map_err(|reason| format!("{}: {reason}", blob.name))?;
        file.finish()?;
        Ok(bytes)
    }

    /// Opens a file, whose digest is computed while it is read.
    pub fn open_blob(&mut self, blob: &Blob) -> Result<CheckedBlob<'_>> {
        let name = &blob.name;
        let path = normal(Path::new(name)).ok_or_else(|| format!("the name {name:?} leads out of it"))?;
        let file: Box<dyn Read> = match self {
            Self::Folder(folder) => {
                // A link may lead anywhere, and a FIFO may wait for ever.
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
                let file = rustix::fs::open(folder.join(&path), flags, Mode::empty());
                let file = File::from(file.map_err(|error| format!("{name}: {error}"))?);
                if !file.metadata().is_ok_and(|metadata| metadata.is_file()) {
                    return Err(format!("{name}: not a regular file"));
                }
                Box::new(file)
            }
            Self::Archive { file, members } => {
                let (offset, size) =
                    place(members, &path).ok_or_else(|| format!("there is no {name} in it"))?;
                file.seek(SeekFrom::Start(offset)).map_err(|error| error.to_string())?;
                Box::new(file.take(size))
            }
        };
        let digest = blob.digest.clone();
        Ok(CheckedBlob { reader: BufReader::with_capacity(1 << 16, Hashed::new(file)), digest })
    }
}

/// A file whose digest is computed while it is read.
pub struct CheckedBlob<'a> {
    reader: BufReader<Hashed<Box<dyn Read + 'a>>>,
    digest: Option<String>,
}

impl CheckedBlob<'_> {
    /// Reads the rest, and fails unless the digest is right.
    pub fn finish(self) -> Result<()> {
        let Self { reader, digest } = self;
        match digest {
            Some(digest) => reader.into_inner().finish(&digest),
            None => Ok(()),
        }
    }
}

impl Read for CheckedBlob<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.reader.read(buffer)
    }
}

impl BufRead for CheckedBlob<'_> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.reader.fill_buf()
    }

    fn consume(&mut self, amount: usize) {
        self.reader.consume(amount);
    }
}

/// Computes the digest of what is read.
pub struct Hashed<R> {
    reader: R,
    hash: Sha256,
}

impl<R: Read> Hashed<R> {
    pub fn new(reader: R) -> Self {
        Self { reader, hash: Sha256::new() }
    }

    /// Reads the rest, and fails unless the digest is this one.
    pub fn finish(mut self, digest: &str) -> Result<()> {
        io::copy(&mut self, &mut io::sink()).map_err(|error| error.to_string())?;
        let expected = digest.strip_prefix("sha256:").unwrap_or(digest);
        let found = self.hash.finalize();
        let digit = |at: usize| char::from_digit(u32::from(found[at / 2] >> (4 - at % 2 * 4) & 0xf), 16);
        if (0..2 * found.len()).filter_map(digit).eq(expected.chars()) {
            Ok(())
        } else {
            Err(format!("its digest is not {digest}"))
        }
    }
}

impl<R: Read> Read for Hashed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(buffer)?;
        self.hash.update(&buffer[..read]);
        Ok(read)
    }
}

/// Returns what changes with an archive, if it is compressed: reading it takes long.
pub fn identity(path: &Path) -> Option<Vec<u8>> {
    let file = File::open(path).ok()?;
    let stat = file.metadata().ok().filter(std::fs::Metadata::is_file)?;
    let mut first = [0; 6];
    (&file).read_exact(&mut first).ok()?;
    extension(&first)?;
    // Another change soon after this one could have the same time.
    let changed = UNIX_EPOCH.checked_add(Duration::from_secs(stat.ctime().try_into().ok()?))?;
    changed.elapsed().ok().filter(|age| *age > SETTLED)?;
    let numbers = [stat.mtime(), stat.mtime_nsec(), stat.ctime(), stat.ctime_nsec()].map(i64::cast_unsigned);
    let numbers = [stat.dev(), stat.ino(), stat.size()].into_iter().chain(numbers);
    Some(numbers.flat_map(u64::to_le_bytes).collect())
}

/// Returns a reader of what is compressed, by its first bytes.
pub fn decompressed<'a>(file: &'a mut (impl BufRead + 'a)) -> io::Result<Box<dyn Read + 'a>> {
    let name = extension(file.fill_buf()?).unwrap_or_default();
    Ok(decompress::reader(name, file))
}

/// Returns the extension of files that begin like this, if they are compressed.
fn extension(start: &[u8]) -> Option<&'static str> {
    const GZIP: &[u8] = &[0x1f, 0x8b];
    const XZ: &[u8] = &[0xfd, b'7', b'z', b'X', b'Z', 0];
    const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
    let known = [(GZIP, ".gz"), (XZ, ".xz"), (ZSTD, ".zst")];
    known.into_iter().find(|(magic, _)| start.starts_with(magic)).map(|(_, name)| name)
}

/// Returns a file without a name that has what is compressed.
fn decompress_file(file: File, cache: &Cache) -> Result<File> {
    let folder = cache.folder("unfinished").map_err(|error| error.to_string())?;
    let mut into = tempfile::tempfile_in(&folder).map_err(|error| error.to_string())?;
    let mut room = Room::of(&folder)?;
    let mut packed = BufReader::new(file);
    let mut from = decompressed(&mut packed).map_err(|error| error.to_string())?;
    let copied = io::copy(&mut (&mut from).take(room.bytes), &mut into).map_err(|error| error.to_string())?;
    room.take(copied)?;
    drop(from);
    into.rewind().map_err(|error| error.to_string())?;
    Ok(into)
}

/// What may be written on a file system.
pub struct Room {
    pub bytes: u64,
    inodes: u64,
}

impl Room {
    /// Leaves a gigabyte, or a twentieth of a small file system, so that a bomb does no more harm than that it is told.
    const RESERVE: u64 = 1 << 30;
    const PART: u64 = 20;
    /// More files than any image has.
    const INODES: u64 = 5_000_000;
    /// What each takes at least, beside what is in it.
    const BLOCK: u64 = 4096;

    pub fn of(folder: &Path) -> Result<Self> {
        let free = rustix::fs::statvfs(folder).map_err(|error| error.to_string())?;
        let reserve = Self::RESERVE.min(free.f_blocks.saturating_mul(free.f_frsize) / Self::PART);
        let bytes = free.f_bavail.saturating_mul(free.f_frsize).saturating_sub(reserve);
        // Some file systems have no fixed number.
        let inodes = if free.f_files == 0 { Self::INODES } else { free.f_favail.min(Self::INODES) };
        Ok(Self { bytes, inodes })
    }

    /// Takes some of it.
    pub fn take(&mut self, bytes: u64) -> Result<()> {
        self.bytes =
            self.bytes.checked_sub(bytes).filter(|left| *left > 0).ok_or(
                "unpacked, it would fill the file system of the cache: TALLY_CACHE names another cache",
            )?;
        Ok(())
    }

    /// Takes an inode.
    pub fn take_inode(&mut self) -> Result<()> {
        self.inodes = self.inodes.checked_sub(1).ok_or("it has more files than there is room for")?;
        self.take(Self::BLOCK)
    }
}

/// Finds the members of an archive.
fn members(file: &mut File) -> Result<BTreeMap<PathBuf, Member>> {
    let mut members = BTreeMap::new();
    let mut archive = tar::Archive::new(file);
    let no_archive = |error: io::Error| format!("it is no archive of an image: {error}");
    for entry in archive.entries_with_seek().map_err(no_archive)?.raw(true) {
        let entry = entry.map_err(no_archive)?;
        let Some(path) = entry.path().ok().and_then(|path| normal(&path)) else { continue };
        let target = || entry.link_name().ok().flatten().map(std::borrow::Cow::into_owned);
        let member = match entry.header().entry_type() {
            tar::EntryType::Regular => Member::File { offset: entry.raw_file_position(), size: entry.size() },
            tar::EntryType::Link => Member::Link(target().unwrap_or_default()),
            tar::EntryType::Symlink => {
                let folder = path.parent().unwrap_or(Path::new(""));
                Member::Link(folder.join(target().unwrap_or_default()))
            }
            _ => continue,
        };
        members.insert(path, member);
        if members.len() > MEMBERS {
            return Err(format!("it is no archive of an image: it has more than {MEMBERS} members"));
        }
    }
    Ok(members)
}

/// Returns the place of a member's content.
fn place(members: &BTreeMap<PathBuf, Member>, path: &Path) -> Option<(u64, u64)> {
    let mut path = path.to_owned();
    for _ in 0..=LINKS {
        match members.get(&path)? {
            Member::File { offset, size } => return Some((*offset, *size)),
            Member::Link(target) => path = normal(target)?,
        }
    }
    None
}

/// Returns a path without `.` and `..`, unless it leads out of where it begins.
fn normal(path: &Path) -> Option<PathBuf> {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(part) => normal.push(part),
            Component::CurDir => {}
            Component::ParentDir if normal.pop() => {}
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(normal)
}

/// Reads all of a small file. The error is for the user.
pub fn read_small(mut from: impl Read, most: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.by_ref().take(most).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    match from.read(&mut [0]) {
        Ok(0) => Ok(bytes),
        Ok(_) => Err(format!("it has more than {most} bytes")),
        Err(error) => Err(error.to_string()),
    }
}
