//! The files of a package, and their archive: everything belongs to root and has one time, so that the same files give
//! the same bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use flate2::{Compression, GzBuilder};
use tar::{Builder, EntryType, Header};

/// What is at a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entry {
    File(Vec<u8>),
    Program(Vec<u8>),
    Link(&'static str),
}

/// Files by their paths, without a slash at the beginning. Folders are those of the files.
#[derive(Debug, Clone, Default)]
pub struct Tree(pub BTreeMap<String, Entry>);

impl Tree {
    /// Adds a file.
    pub fn file(&mut self, path: impl Into<String>, content: impl Into<Vec<u8>>) {
        self.0.insert(path.into(), Entry::File(content.into()));
    }

    /// Adds a file of this machine.
    pub fn copy(&mut self, path: impl Into<String>, from: &Path) -> Result<()> {
        self.file(path, read(from)?);
        Ok(())
    }

    /// Adds a program of this machine.
    pub fn program(&mut self, path: impl Into<String>, from: &Path) -> Result<()> {
        self.0.insert(path.into(), Entry::Program(read(from)?));
        Ok(())
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, path: impl Into<String>, target: &'static str) {
        self.0.insert(path.into(), Entry::Link(target));
    }

    /// Returns the number of bytes in all files.
    pub fn size(&self) -> usize {
        let size = |entry: &Entry| match entry {
            Entry::File(content) | Entry::Program(content) => content.len(),
            Entry::Link(_) => 0,
        };
        self.0.values().map(size).sum()
    }

    /// Returns a tar archive, packed by gzip. `top` is put in front of all paths.
    pub fn archive(&self, top: &str, time: u64) -> Result<Vec<u8>> {
        let mut tar = Builder::new(Vec::new());
        let mut folders = BTreeSet::new();
        for (path, entry) in &self.0 {
            for (end, _) in path.match_indices('/') {
                if folders.insert(&path[..end]) {
                    let folder = format!("{top}{}/", &path[..end]);
                    append(&mut tar, EntryType::Directory, 0o755, time, &folder, &[])?;
                }
            }
            let path = format!("{top}{path}");
            match entry {
                Entry::File(content) => append(&mut tar, EntryType::Regular, 0o644, time, &path, content)?,
                Entry::Program(content) => append(&mut tar, EntryType::Regular, 0o755, time, &path, content)?,
                Entry::Link(target) => {
                    let mut header = header(EntryType::Symlink, 0o777, time, 0);
                    tar.append_link(&mut header, &path, target)?;
                }
            }
        }
        gzip(&tar.into_inner()?)
    }
}

fn append(
    tar: &mut Builder<Vec<u8>>,
    kind: EntryType,
    mode: u32,
    time: u64,
    path: &str,
    content: &[u8],
) -> Result<()> {
    let mut header = header(kind, mode, time, content.len());
    Ok(tar.append_data(&mut header, path, content)?)
}

fn header(kind: EntryType, mode: u32, time: u64, size: usize) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_mtime(time);
    header.set_size(size as u64);
    header.set_uid(0);
    header.set_gid(0);
    header
}

/// Packs bytes by gzip, without a time or a name.
pub fn gzip(bytes: &[u8]) -> Result<Vec<u8>> {
    let mut packed = GzBuilder::new().mtime(0).write(Vec::new(), Compression::best());
    packed.write_all(bytes)?;
    Ok(packed.finish()?)
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).with_context(|| path.display().to_string())
}

/// Returns a time since 1970 as ISO 8601 has it.
pub fn iso_time(seconds: u64) -> String {
    const DAY: u64 = 86_400;
    let (days, second) = (seconds / DAY, seconds % DAY);
    // Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms": the era begins on 1 March of year 0.
    let day = days + 719_468;
    let (era, of_era) = (day / 146_097, day % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let (day, month) = (of_year - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
    let year = era * 400 + year + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", second / 3600, second / 60 % 60, second % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        assert_eq!(iso_time(0), "1970-01-01T00:00:00Z");
        assert_eq!(iso_time(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(iso_time(1_764_028_799), "2025-11-24T23:59:59Z");
    }

    #[test]
    fn an_archive_has_each_folder_once_and_before_its_files() {
        let mut tree = Tree::default();
        for path in ["a/b/one", "a/b/two", "a/three", "c/four"] {
            tree.file(path, path);
        }
        tree.link("c/five", "four");
        let archive = tree.archive("top/", 7).unwrap();
        let mut tar = tar::Archive::new(flate2::read::GzDecoder::new(&archive[..]));
        let entries: Vec<_> = tar
            .entries()
            .unwrap()
            .map(|entry| {
                let entry = entry.unwrap();
                let header = entry.header();
                assert_eq!((header.uid().unwrap(), header.mtime().unwrap()), (0, 7));
                String::from_utf8(entry.path_bytes().into_owned()).unwrap()
            })
            .collect();
        let expected = ["a/", "a/b/", "a/b/one", "a/b/two", "a/three", "c/", "c/five", "c/four"]
            .map(|path| format!("top/{path}"));
        assert_eq!(entries, expected);
    }
}
