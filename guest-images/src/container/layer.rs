//! Unpacks the layers of an image, one over the other (OCI image-spec, `layer.md`).
//!
//! Each path is resolved as inside the image: its links lead nowhere else, whatever they say (openat2(2),
//! `RESOLVE_IN_ROOT`), and the last part of a path is never followed. Device nodes are left out: a guest has its own.

use std::collections::{BTreeMap, HashSet};
use std::ffi::{CString, OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{
    self as sys, AtFlags, FileType, Mode, OFlags, ResolveFlags, Statx, StatxFlags, Timespec, Timestamps,
};
use rustix::io::Errno;
use tar::EntryType;

use super::files::{Room, read_small};
use super::owners::{Owned, Owners};

/// Names that stand for what a layer removes: this before a name, or for all that lower layers have in a folder.
const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// The most bytes of a name, a link or a list of attributes.
const LONGEST: u64 = 1 << 20;
/// The most parts of a path.
const DEEPEST: usize = 256;
/// The most links to folders that are not there yet, one leading to the other.
const LINKS: usize = 16;
const PERMISSIONS: u32 = 0o7777;
/// What the user who runs this program can do with a file whatever its permissions are in the image, and with a folder.
const OWN_FILE: u32 = 0o600;
const OWN_FOLDER: u32 = 0o700;

type Result<T> = std::result::Result<T, String>;

/// A folder into which layers are unpacked.
pub struct Unpacking {
    root: OwnedFd,
    path: PathBuf,
    owners: BTreeMap<u64, Owned>,
    pub(super) room: Room,
    devices: usize,
    /// What the layer that is being unpacked has added: names in folders.
    added: HashSet<(u64, OsString)>,
    /// Folders of which it has removed what lower layers have in them.
    emptied: HashSet<u64>,
}

/// What the headers before a member say of it.
#[derive(Default)]
struct Extension {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    user: Option<u32>,
    group: Option<u32>,
}

/// A member of a layer.
struct Member<'a> {
    path: &'a [u8],
    link: &'a [u8],
    kind: EntryType,
    owned: Owned,
    modified: i64,
}

impl Unpacking {
    pub fn into(root: &Path) -> Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self {
            root: sys::open(root, flags, Mode::empty()).map_err(|error| error.to_string())?,
            path: fs::canonicalize(root).map_err(|error| error.to_string())?,
            owners: BTreeMap::new(),
            room: Room::of(root)?,
            devices: 0,
            added: HashSet::new(),
            emptied: HashSet::new(),
        })
    }

    /// Unpacks a layer over those before.
    pub fn apply(&mut self, layer: &mut impl Read) -> Result<()> {
        let mut archive = tar::Archive::new(layer);
        let entries = archive.entries().map_err(|error| error.to_string())?;
        let mut extension = Extension::default();
        // What this layer has added is not what it removes.
        (self.added, self.emptied) = (HashSet::new(), HashSet::new());
        for entry in entries.raw(true) {
            let mut entry = entry.map_err(|error| error.to_string())?;
            let header = entry.header().clone();
            match header.entry_type() {
                EntryType::GNULongName => extension.path = Some(terminated(read_small(entry, LONGEST)?)),
                EntryType::GNULongLink => extension.link = Some(terminated(read_small(entry, LONGEST)?)),
                EntryType::XHeader => extension.add(&read_small(entry, LONGEST)?)?,
                EntryType::XGlobalHeader => {}
                kind => {
                    let said = std::mem::take(&mut extension);
                    let path = said.path.unwrap_or_else(|| entry.path_bytes().into_owned());
                    let link = entry.link_name_bytes().map(std::borrow::Cow::into_owned);
                    let number = |number: io::Result<u64>| {
                        number.ok().and_then(|number| u32::try_from(number).ok()).unwrap_or(0)
                    };
                    let member = Member {
                        path: &path,
                        link: &said.link.or(link).unwrap_or_default(),
                        kind,
                        owned: Owned {
                            user: said.user.unwrap_or_else(|| number(header.uid())),
                            group: said.group.unwrap_or_else(|| number(header.gid())),
                            mode: header.mode().unwrap_or(0) & PERMISSIONS,
                        },
                        modified: header.mtime().unwrap_or(0).try_into().unwrap_or(0),
                    };
                    self.add(&member, &mut entry).map_err(|reason| format!("{}: {reason}", shown(&path)))?;
                }
            }
        }
        Ok(())
    }

    /// Makes a folder, and those above it, if they are not there.
    pub fn make_directory(&mut self, path: &str) -> Result<()> {
        let parts = parts(path.as_bytes())?;
        self.parent(&parts).map(drop).map_err(|reason| format!("its working folder {path}: {reason}"))
    }

    /// Says what was left out.
    pub fn left_out(&self) -> Option<String> {
        (self.devices > 0).then(|| format!("{} device nodes of the image are left out", self.devices))
    }

    /// Writes down to whom all that belongs.
    pub fn finish(self, owners: &Path) -> Result<()> {
        Owners::of(self.owners).write(owners, &self.path)
    }

    fn add(&mut self, member: &Member, content: &mut impl Read) -> Result<()> {
        self.room.take_inode()?;
        let parts = parts(member.path)?;
        let Some((&name, above)) = parts.split_last() else {
            // The image's root itself.
            self.note(stat(&self.root)?.stx_ino, member.owned);
            return Ok(());
        };
        let parent = self.parent(above)?;
        if name.as_bytes() == OPAQUE {
            return self.remove_lower(&parent);
        }
        if let Some(name) = name.as_bytes().strip_prefix(WHITEOUT) {
            let name = [OsStr::from_bytes(name)];
            return if name[0].is_empty() || is_special(name[0]) {
                Ok(())
            } else {
                self.remove_if_lower(&parent, name[0])
            };
        }
        let is_folder = member.kind == EntryType::Directory;
        let found = find(&parent, name)?;
        match found {
            // A folder stays as it is, with what lower layers have in it.
            Some(stat) if is_folder && kind(&stat) == FileType::Directory => {}
            Some(_) => remove(&parent, name)?,
            None => {}
        }
        match member.kind {
            EntryType::Directory => self.make_folder(&parent, name)?,
            EntryType::Regular | EntryType::Continuous => self.write(&parent, name, member, content)?,
            EntryType::Symlink => {
                sys::symlinkat(member.link, &parent, name).map_err(|error| error.to_string())?;
            }
            EntryType::Link => return self.link(&parent, name, member.link),
            EntryType::Fifo => {
                let mode = Mode::from_raw_mode(OWN_FILE);
                sys::mknodat(&parent, name, FileType::Fifo, mode, 0).map_err(|error| error.to_string())?;
            }
            EntryType::Char | EntryType::Block => {
                self.devices += 1;
                return Ok(());
            }
            EntryType::GNUSparse => return Err("it is a sparse file, which no image should have".to_owned()),
            _ => return Ok(()),
        }
        let stat = find(&parent, name)?.ok_or("it is gone")?;
        if is_folder {
            set_mode(&parent, name, member.owned.mode | OWN_FOLDER)?;
        }
        self.note_added(&parent, name)?;
        self.note(stat.stx_ino, member.owned);
        Ok(())
    }

    fn note(&mut self, inode: u64, owned: Owned) {
        self.owners.insert(inode, owned);
    }

    /// Opens a folder of the image, following links inside of it. Makes those that are not there.
    fn parent(&mut self, parts: &[&OsStr]) -> Result<OwnedFd> {
        self.parent_over(parts, LINKS)
    }

    /// The same, over so many links that lead to what is not there.
    fn parent_over(&mut self, parts: &[&OsStr], links: usize) -> Result<OwnedFd> {
        let path: PathBuf = parts.iter().collect();
        match self.open(&path) {
            Ok(found) => return Ok(found),
            Err(Errno::NOENT) => {}
            Err(error) => return Err(error.to_string()),
        }
        let open_root = self.open(Path::new("."));
        let (mut at, mut place) = (open_root.map_err(|error| error.to_string())?, PathBuf::new());
        for part in parts {
            place.push(part);
            at = match self.open(&place) {
                Ok(found) => found,
                Err(Errno::NOENT) => {
                    if find(&at, part)?.is_some() {
                        let left = links.checked_sub(1).ok_or("too many links")?;
                        let target =
                            sys::readlinkat(&at, *part, Vec::new()).map_err(|error| error.to_string())?;
                        let target = inside(&place, target.as_bytes());
                        self.parent_over(&target.iter().collect::<Vec<_>>(), left)?;
                        self.open(&place).map_err(|error| error.to_string())?
                    } else {
                        self.room.take_inode()?;
                        self.make_folder(&at, part)?;
                        self.note_added(&at, part)?;
                        let made = self.open(&place).map_err(|error| error.to_string())?;
                        self.note(stat(&made)?.stx_ino, Owned { user: 0, group: 0, mode: 0o755 });
                        made
                    }
                }
                Err(error) => return Err(error.to_string()),
            };
        }
        Ok(at)
    }

    fn open(&self, path: &Path) -> std::result::Result<OwnedFd, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        let inside = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        loop {
            match sys::openat2(&self.root, path, flags, Mode::empty(), inside) {
                // Something else has been renamed or mounted meanwhile, anywhere.
                Err(Errno::AGAIN) => {}
                opened => return opened,
            }
        }
    }

    fn write(
        &mut self,
        parent: &OwnedFd,
        name: &OsStr,
        member: &Member,
        content: &mut impl Read,
    ) -> Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(member.owned.mode & 0o777 | OWN_FILE);
        let file = sys::openat(parent, name, flags, mode).map_err(|error| error.to_string())?;
        let mut file = File::from(file);
        let copied =
            io::copy(&mut content.take(self.room.bytes), &mut file).map_err(|error| error.to_string())?;
        self.room.take(copied)?;
        // The umask has been at work.
        sys::fchmod(&file, mode).map_err(|error| error.to_string())?;
        let modified = Timespec { tv_sec: member.modified, tv_nsec: 0 };
        let times = Timestamps { last_access: modified, last_modification: modified };
        // A time that the file system cannot keep is no reason to give up.
        let _ = sys::futimens(&file, &times);
        Ok(())
    }

    /// Makes another name of a file that the image has already.
    fn link(&mut self, parent: &OwnedFd, name: &OsStr, target: &[u8]) -> Result<()> {
        let to = parts(target)?;
        let missing = || format!("it is a link to {}, which the image does not have", shown(target));
        let (old, above) = to.split_last().ok_or_else(missing)?;
        let path: PathBuf = above.iter().collect();
        let from = self.open(&path).map_err(|_| missing())?;
        let stat = find(&from, old)?.ok_or_else(missing)?;
        if kind(&stat) == FileType::Directory {
            return Err("it is a link to a folder".to_owned());
        }
        sys::linkat(&from, *old, parent, name, AtFlags::empty()).map_err(|error| error.to_string())?;
        self.note_added(parent, name)
    }

    fn note_added(&mut self, parent: &OwnedFd, name: &OsStr) -> Result<()> {
        self.added.insert((stat(parent)?.stx_ino, name.to_owned()));
        Ok(())
    }

    fn make_folder(&self, parent: &OwnedFd, name: &OsStr) -> Result<()> {
        // By way of links, a folder may be deeper than any path says.
        let place = fs::read_link(descriptor(parent)).map_err(|error| error.to_string())?;
        let depth = place.strip_prefix(&self.path).map_or(0, |inside| inside.components().count());
        if depth >= DEEPEST {
            return Err(format!("it has folders more than {DEEPEST} deep"));
        }
        match sys::mkdirat(parent, name, Mode::from_raw_mode(OWN_FOLDER | 0o055)) {
            Ok(()) | Err(Errno::EXIST) => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Removes what lower layers have under a name.
    fn remove_if_lower(&mut self, parent: &OwnedFd, name: &OsStr) -> Result<()> {
        let Some(found) = find(parent, name)? else { return Ok(()) };
        let is_added = self.added.contains(&(stat(parent)?.stx_ino, name.to_owned()));
        if kind(&found) != FileType::Directory {
            return if is_added { Ok(()) } else { remove(parent, name) };
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = sys::openat(parent, name, flags, Mode::empty()).map_err(|error| error.to_string())?;
        self.remove_lower(&folder)?;
        if is_added {
            return Ok(());
        }
        match sys::unlinkat(parent, name, AtFlags::REMOVEDIR) {
            // This layer has added something in it.
            Ok(()) | Err(Errno::NOTEMPTY) => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Removes what lower layers have in a folder, and in what this layer has added there. Once for each folder: all
    /// that comes later is this layer's.
    fn remove_lower(&mut self, folder: &OwnedFd) -> Result<()> {
        if !self.emptied.insert(stat(folder)?.stx_ino) {
            return Ok(());
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = sys::openat(folder, c".", flags, Mode::empty()).map_err(|error| error.to_string())?;
        let entries: Vec<CString> = sys::Dir::new(opened)
            .and_then(|entries| {
                entries.map(|entry| entry.map(|entry| entry.file_name().to_owned())).collect()
            })
            .map_err(|error: Errno| error.to_string())?;
        let names = entries.iter().map(|name| OsStr::from_bytes(name.as_bytes()));
        for name in names.filter(|name| !is_special(name)) {
            self.remove_if_lower(folder, name)?;
        }
        Ok(())
    }
}

impl Extension {
    /// Takes what a PAX header says (pax(1), "pax Extended Header").
    fn add(&mut self, header: &[u8]) -> Result<()> {
        let number = |value: &[u8]| std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
        for (key, value) in records(header).ok_or("it has broken attributes")? {
            match key {
                b"path" => self.path = Some(value.to_vec()),
                b"linkpath" => self.link = Some(value.to_vec()),
                b"uid" => self.user = number(value),
                b"gid" => self.group = number(value),
                // The next header's size is not what follows it.
                b"size" => return Err("a file has more than eight gigabytes".to_owned()),
                key if key.starts_with(b"GNU.sparse") => {
                    return Err("it has a sparse file, which no image should have".to_owned());
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Returns the records of a PAX header: the length of each in decimal digits, a blank, key, `=`, value, and a newline.
/// A value may have newlines, too.
fn records(mut header: &[u8]) -> Option<Vec<(&[u8], &[u8])>> {
    let mut records = Vec::new();
    while !header.is_empty() {
        let blank = header.iter().position(|byte| *byte == b' ')?;
        let length: usize = std::str::from_utf8(&header[..blank]).ok()?.parse().ok()?;
        let (record, rest) = header.split_at_checked(length)?;
        let record = record.get(blank + 1..)?.strip_suffix(b"\n")?;
        let equals = record.iter().position(|byte| *byte == b'=')?;
        records.push((&record[..equals], &record[equals + 1..]));
        header = rest;
    }
    Some(records)
}

/// Returns the parts of a path.
fn parts(path: &[u8]) -> Result<Vec<&OsStr>> {
    let parts: Vec<&OsStr> = path
        .split(|byte| *byte == b'/')
        .filter(|part| !part.is_empty() && *part != b".")
        .map(OsStr::from_bytes)
        .collect();
    if parts.iter().any(|part| part.as_bytes() == b"..") {
        return Err("this path leads out of the image".to_owned());
    }
    if parts.len() > DEEPEST {
        return Err(format!("this path has more than {DEEPEST} parts"));
    }
    Ok(parts)
}

/// Returns the path to which a link in the image leads, inside of it.
fn inside(link: &Path, target: &[u8]) -> PathBuf {
    let mut path = match target.first() {
        Some(b'/') => PathBuf::new(),
        _ => link.parent().unwrap_or(Path::new("")).to_owned(),
    };
    for part in target.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => drop(path.pop()),
            part => path.push(OsStr::from_bytes(part)),
        }
    }
    path
}

fn is_special(name: &OsStr) -> bool {
    matches!(name.as_bytes(), b"." | b"..")
}

/// Returns as much of a path as a line has room for.
fn shown(path: &[u8]) -> String {
    const MOST: usize = 200;
    String::from_utf8_lossy(&path[..path.len().min(MOST)]).into_owned()
}

fn terminated(mut bytes: Vec<u8>) -> Vec<u8> {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    bytes.truncate(end);
    bytes
}

fn kind(stat: &Statx) -> FileType {
    FileType::from_raw_mode(stat.stx_mode.into())
}

fn stat(file: impl AsFd) -> Result<Statx> {
    sys::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS).map_err(|error| error.to_string())
}

/// Finds a name in a folder, and does not follow it.
fn find(parent: &OwnedFd, name: &OsStr) -> Result<Option<Statx>> {
    match sys::statx(parent, name, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::BASIC_STATS) {
        Ok(stat) => Ok(Some(stat)),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

/// Sets the mode of a folder, which is no link: the caller has just looked, and nobody else is here.
fn set_mode(parent: &OwnedFd, name: &OsStr, mode: u32) -> Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = sys::openat(parent, name, flags, Mode::empty()).map_err(|error| error.to_string())?;
    sys::fchmod(folder, Mode::from_raw_mode(mode & 0o777)).map_err(|error| error.to_string())
}

/// Returns the path of a descriptor in this process.
fn descriptor(file: &OwnedFd) -> PathBuf {
    Path::new("/proc/self/fd").join(file.as_raw_fd().to_string())
}

/// Removes what has this name in a folder, with all that is below it.
fn remove(parent: &OwnedFd, name: &OsStr) -> Result<()> {
    let Some(stat) = find(parent, name)? else { return Ok(()) };
    if kind(&stat) == FileType::Directory {
        // It does not follow links either.
        let place = descriptor(parent).join(name);
        fs::remove_dir_all(place).map_err(|error| error.to_string())
    } else {
        sys::unlinkat(parent, name, AtFlags::empty()).map_err(|error| error.to_string())
    }
}
