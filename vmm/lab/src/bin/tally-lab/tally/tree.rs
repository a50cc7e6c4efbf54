//! Directories of this machine as a tar archive, and the changes in the archive that comes back from the host.
//!
//! Only the guest's changes are written. Changes that other programs made here in the meantime are kept.

use std::collections::BTreeMap;
use std::fs::{self, File, Metadata};
use std::io::{self, Write};
use std::mem::discriminant;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Component, Path, PathBuf};

use tally_lab::{Error, Result};
use tar::{Builder, EntryType, Header};

/// Creates an archive with a limit on its size.
pub struct Packer {
    archive: Builder<Vec<u8>>,
    /// Remaining size.
    left: u64,
}

/// The files are larger than the limit.
pub struct TooLarge;

impl Packer {
    /// Creates an empty archive. `limit` is in bytes.
    pub fn new(limit: u64) -> Self {
        Self { archive: Builder::new(Vec::new()), left: limit }
    }

    /// Subtracts the size of another file, which is not in the archive, from the limit.
    pub fn reserve(&mut self, size: u64) -> std::result::Result<(), TooLarge> {
        self.left = self.left.checked_sub(size).ok_or(TooLarge)?;
        Ok(())
    }

    /// Adds a directory and everything in it, under its own path.
    pub fn folder(&mut self, path: &Path) -> Result<std::result::Result<(), TooLarge>> {
        /// Assumed size of an entry without its content: a page.
        const ENTRY: u64 = 4096;
        let mut waiting = vec![path.to_owned()];
        while let Some(path) = waiting.pop() {
            let metadata = fs::symlink_metadata(&path).map_err(file("read", &path))?;
            if self.reserve(ENTRY + if metadata.is_file() { metadata.len() } else { 0 }).is_err() {
                return Ok(Err(TooLarge));
            }
            self.entry(&path, &metadata).map_err(file("read", &path))?;
            if metadata.is_dir() {
                let entries: io::Result<Vec<_>> =
                    fs::read_dir(&path).and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect());
                let mut entries = entries.map_err(file("read", &path))?;
                entries.sort_unstable_by(|a, b| b.cmp(a));
                waiting.extend(entries);
            }
        }
        Ok(Ok(()))
    }

    fn entry(&mut self, path: &Path, metadata: &Metadata) -> io::Result<()> {
        let name = path.strip_prefix("/").unwrap_or(path);
        let mut header = Header::new_gnu();
        header.set_metadata(metadata);
        if metadata.is_symlink() {
            header.set_size(0);
            self.archive.append_link(&mut header, name, fs::read_link(path)?)
        } else if metadata.is_file() {
            // The size is that of the content that was read, as the file may have changed since `metadata`.
            let content = fs::read(path)?;
            header.set_size(content.len() as u64);
            self.archive.append_data(&mut header, name, &content[..])
        } else if metadata.is_dir() || metadata.file_type().is_fifo() {
            header.set_size(0);
            self.archive.append_data(&mut header, name, io::empty())
        } else {
            // Devices and sockets make no sense on the host.
            Ok(())
        }
    }

    /// Returns the finished archive.
    pub fn finish(self) -> Result<Vec<u8>> {
        self.archive.into_inner().map_err(file("pack", Path::new("folders")))
    }
}

/// The entries of an archive, by path.
#[derive(Debug, Default)]
pub struct Tree<'a>(BTreeMap<PathBuf, Entry<'a>>);

/// A file or directory.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry<'a> {
    permissions: u32,
    content: Content<'a>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Content<'a> {
    Folder,
    /// A file's bytes, and its modification time in seconds.
    File(&'a [u8], u64),
    Link(PathBuf),
    /// A FIFO, device or socket.
    Special,
}

impl<'a> Tree<'a> {
    /// Reads a whole archive.
    pub fn read(archive: &'a [u8]) -> Result<Self> {
        /// The end of a complete archive.
        const END: [u8; 1024] = [0; 1024];
        if !archive.ends_with(&END) {
            return Err(Error::Lost);
        }
        Self::entries(archive).map_err(|_| Error::Lost)
    }

    fn entries(archive: &'a [u8]) -> io::Result<Self> {
        let mut tree: BTreeMap<PathBuf, Entry> = BTreeMap::new();
        for entry in tar::Archive::new(archive).entries()? {
            let entry = entry?;
            let header = entry.header();
            let permissions = header.mode()? & 0o7777;
            let begin = usize::try_from(entry.raw_file_position()).map_err(io::Error::other)?;
            let length = usize::try_from(entry.size()).map_err(io::Error::other)?;
            let bytes = archive.get(begin..begin + length).ok_or(io::ErrorKind::UnexpectedEof)?;
            let target = || io::Result::Ok(entry.link_name()?.unwrap_or_default().into_owned());
            let content = match header.entry_type() {
                EntryType::Directory => Content::Folder,
                EntryType::Symlink => Content::Link(target()?),
                EntryType::Regular => Content::File(bytes, header.mtime()?),
                // A hard link to an earlier entry.
                EntryType::Link => match tree.get(&plain(&target()?)) {
                    Some(first) => first.content.clone(),
                    None => return Err(io::ErrorKind::InvalidData.into()),
                },
                _ => Content::Special,
            };
            tree.insert(plain(&entry.path()?), Entry { permissions, content });
        }
        Ok(Self(tree))
    }

    /// Returns the content of a file.
    pub fn file(&self, name: &str) -> Option<&'a [u8]> {
        match self.0.get(Path::new(name))?.content {
            Content::File(bytes, _) => Some(bytes),
            _ => None,
        }
    }

    /// Returns the entries of a directory, with paths relative to the directory.
    pub fn folder(&self, name: &Path) -> Result<Self> {
        let name = plain(name);
        let within = |(path, entry): (&PathBuf, &Entry<'a>)| {
            Some((path.strip_prefix(&name).ok()?.to_owned(), entry.clone()))
        };
        let tree: BTreeMap<_, _> = self.0.iter().filter_map(within).collect();
        if tree.get(Path::new("")).is_none_or(|root| root.content != Content::Folder) {
            return Err(Error::Lost);
        }
        Ok(Self(tree))
    }

    /// Makes the changes between the tree `before` and this tree in the directory `root`.
    pub fn apply_changes(&self, before: &Tree<'a>, root: &Path) -> Result<()> {
        // In reverse order, the entries of a directory come before the directory itself.
        for (name, old) in before.0.iter().rev() {
            let is_removed = self.0.get(name).is_none_or(|new| !new.has_type_of(old));
            if is_removed {
                remove(&root.join(name)).map_err(file("remove", &root.join(name)))?;
            }
        }
        for (name, new) in &self.0 {
            let old = before.0.get(name);
            if old != Some(new) {
                let path = root.join(name);
                new.write(old, &path).map_err(file("write", &path))?;
            }
        }
        Ok(())
    }
}

impl Entry<'_> {
    /// Returns true if both entries have the same file type.
    fn has_type_of(&self, other: &Self) -> bool {
        discriminant(&self.content) == discriminant(&other.content)
    }

    /// Creates or changes the file at `path`, which was `old` when it was packed.
    fn write(&self, old: Option<&Self>, path: &Path) -> io::Result<()> {
        match &self.content {
            Content::Folder => match fs::create_dir(path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && is_folder(path) => {}
                created => created?,
            },
            Content::File(bytes, _) => {
                let mut options = File::options();
                options.write(true).create(true).truncate(true).custom_flags(libc::O_NOFOLLOW);
                options.open(path)?.write_all(bytes)?;
            }
            Content::Link(target) => {
                if path.is_symlink() {
                    fs::remove_file(path)?;
                }
                return symlink(target, path);
            }
            Content::Special => return Ok(()),
        }
        if old.is_none_or(|old| old.permissions != self.permissions || !old.has_type_of(self)) {
            fs::set_permissions(path, fs::Permissions::from_mode(self.permissions))?;
        }
        Ok(())
    }
}

fn is_folder(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_dir())
}

/// Removes a file or directory. Keeps a directory to which other programs have added files in the meantime.
fn remove(path: &Path) -> io::Result<()> {
    let removed = if is_folder(path) { fs::remove_dir(path) } else { fs::remove_file(path) };
    match removed {
        Err(error) if [io::ErrorKind::NotFound, io::ErrorKind::DirectoryNotEmpty].contains(&error.kind()) => {
            Ok(())
        }
        removed => removed,
    }
}

/// Writes the blocks of an image that have changed. Holes in the file remain holes where nothing was written.
pub fn apply_image(content: &[u8], path: &Path) -> Result<()> {
    const BLOCK: usize = 4096;
    let image = File::options().read(true).write(true).open(path).map_err(file("write", path))?;
    let write = || {
        image.set_len(content.len() as u64)?;
        let mut old = [0; BLOCK];
        for (at, new) in (0..).step_by(BLOCK).zip(content.chunks(BLOCK)) {
            let old = &mut old[..new.len()];
            image.read_exact_at(old, at)?;
            if *old != *new {
                image.write_all_at(new, at)?;
            }
        }
        Ok(())
    };
    write().map_err(file("write", path))
}

/// Returns a path without `/`, `.` and `..`.
fn plain(name: &Path) -> PathBuf {
    name.components().filter(|part| matches!(part, Component::Normal(_))).collect()
}

fn file(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::File { action, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    fn packed(folder: &Path) -> Vec<u8> {
        let mut packer = Packer::new(1 << 20);
        assert!(packer.folder(folder).unwrap().is_ok(), "the directory is small");
        packer.finish().unwrap()
    }

    #[test]
    fn files_that_a_guest_creates_changes_and_removes_come_back() {
        let (guest, here) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for root in [guest.path(), here.path()] {
            fs::create_dir_all(root.join("gone/sub")).unwrap();
            fs::write(root.join("gone/sub/file"), "x").unwrap();
            fs::write(root.join("changed"), "old").unwrap();
            fs::write(root.join("becomes a folder"), "old").unwrap();
            symlink("old", root.join("link")).unwrap();
        }
        let (before, root) = (packed(guest.path()), guest.path());
        fs::remove_dir_all(root.join("gone")).unwrap();
        fs::write(root.join("changed"), "new").unwrap();
        fs::remove_file(root.join("becomes a folder")).unwrap();
        fs::create_dir(root.join("becomes a folder")).unwrap();
        fs::write(root.join("becomes a folder/script"), "new").unwrap();
        let executable = fs::Permissions::from_mode(0o751);
        fs::set_permissions(root.join("becomes a folder/script"), executable).unwrap();
        fs::remove_file(root.join("link")).unwrap();
        symlink("new", root.join("link")).unwrap();
        let after = packed(root);

        let trees = [&before, &after].map(|archive| Tree::read(archive).unwrap().folder(root).unwrap());
        trees[1].apply_changes(&trees[0], here.path()).unwrap();
        let here = here.path();
        assert!(!here.join("gone").exists());
        assert_eq!(fs::read(here.join("changed")).unwrap(), b"new");
        assert_eq!(fs::read(here.join("becomes a folder/script")).unwrap(), b"new");
        assert_eq!(fs::metadata(here.join("becomes a folder/script")).unwrap().mode() & 0o777, 0o751);
        assert_eq!(fs::read_link(here.join("link")).unwrap(), Path::new("new"));
    }

    #[test]
    fn changes_of_other_programs_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        fs::write(root.join("output"), "").unwrap();
        let archive = packed(root);
        fs::write(root.join("output"), "written meanwhile").unwrap();
        fs::write(root.join("another"), "made meanwhile").unwrap();
        let tree = Tree::read(&archive).unwrap().folder(root).unwrap();
        tree.apply_changes(&tree, root).unwrap();
        assert_eq!(fs::read(root.join("output")).unwrap(), b"written meanwhile");
        assert!(root.join("another").exists());
    }

    #[test]
    fn a_guest_does_not_write_through_a_link() {
        let (folder, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let root = folder.path();
        let before = packed(root);
        fs::create_dir(root.join("sub")).unwrap();
        fs::write(root.join("sub/file"), "x").unwrap();
        let after = packed(root);
        fs::remove_dir_all(root.join("sub")).unwrap();
        symlink(elsewhere.path(), root.join("sub")).unwrap();
        let trees = [&before, &after].map(|archive| Tree::read(archive).unwrap().folder(root).unwrap());
        assert!(trees[1].apply_changes(&trees[0], root).is_err());
        assert!(!elsewhere.path().join("file").exists());
    }

    #[test]
    fn an_archive_that_is_cut_off_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("file"), "x").unwrap();
        let archive = packed(folder.path());
        assert!(matches!(Tree::read(&archive[..512]), Err(Error::Lost)));
        assert!(matches!(Tree::read(&archive[..archive.len() - 512]), Err(Error::Lost)));
        assert!(matches!(Tree::read(&archive).unwrap().folder(Path::new("/other")), Err(Error::Lost)));
    }

    #[test]
    fn files_larger_than_the_limit_are_not_packed() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("file"), [0; 10_000]).unwrap();
        assert!(Packer::new(18_000).folder(folder.path()).unwrap().is_err());
        assert!(Packer::new(20_000).folder(folder.path()).unwrap().is_ok());
    }

    #[test]
    fn a_hole_in_an_image_stays_one() {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(1 << 20).unwrap();
        let mut content = vec![0; 1 << 20];
        content[300_000] = 7;
        apply_image(&content, image.path()).unwrap();
        assert!(fs::read(image.path()).unwrap() == content);
        assert!(image.as_file().metadata().unwrap().blocks() <= 16);
    }
}
