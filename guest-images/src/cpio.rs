//! Writes cpio archives in the format of initrds (`newc`; see the kernel's
//! `Documentation/driver-api/early-userspace/buffer-format.rst`).
//!
//! The output is reproducible: the owner is always root and times are zero. An initrd may consist of several archives,
//! so every archive ends on a four-byte boundary.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::error::{Error, Result};

const DIRECTORY: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;
const CHARACTER_DEVICE: u32 = 0o020_000;

/// An archive in memory.
#[derive(Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
    folders: BTreeSet<String>,
}

impl Archive {
    /// Creates an empty archive.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a directory and its parents.
    pub fn folder(&mut self, path: &str) {
        let path = path.trim_matches('/');
        if path.is_empty() || self.folders.contains(path) {
            return;
        }
        self.parents(path);
        self.folders.insert(path.to_owned());
        self.entry(path, DIRECTORY | 0o755, (0, 0), &[]);
    }

    /// Adds a file with these permissions.
    pub fn file(&mut self, path: &str, permissions: u32, content: &[u8]) {
        let path = path.trim_start_matches('/');
        self.parents(path);
        self.entry(path, FILE | (permissions & 0o7777), (0, 0), content);
    }

    /// Adds a file from this machine, with its permissions.
    pub fn copy(&mut self, path: &str, from: &Path) -> Result<()> {
        let content = fs::read(from).map_err(Error::io("read", from))?;
        let permissions = fs::metadata(from).map_err(Error::io("read", from))?.permissions().mode();
        self.file(path, permissions, &content);
        Ok(())
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, path: &str, target: &str) {
        let path = path.trim_start_matches('/');
        self.parents(path);
        self.entry(path, SYMLINK | 0o777, (0, 0), target.as_bytes());
    }

    /// Adds a character device.
    pub fn device(&mut self, path: &str, major: u32, minor: u32) {
        let path = path.trim_start_matches('/');
        self.parents(path);
        self.entry(path, CHARACTER_DEVICE | 0o600, (major, minor), &[]);
    }

    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    fn parents(&mut self, path: &str) {
        if let Some((parent, _)) = path.rsplit_once('/') {
            self.folder(parent);
        }
    }

    fn entry(&mut self, name: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.entries += 1;
        let size = u32::try_from(content.len()).expect("a file in an initrd is smaller than 4 GiB");
        let name_size = u32::try_from(name.len() + 1).expect("paths are short");
        let fields = [self.entries, mode, 0, 0, 1, 0, size, 0, 0, device.0, device.1, name_size, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        let padded = self.bytes.len().next_multiple_of(4);
        self.bytes.resize(padded, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_entry_has_the_documented_format() {
        let mut archive = Archive::new();
        archive.file("/init", 0o755, b"hello");
        let bytes = archive.finish();
        let header = "070701\
            00000001000081ed000000000000000000000001000000000000000500000000\
            00000000000000000000000000000005\
            00000000";
        assert_eq!(std::str::from_utf8(&bytes[..110]).unwrap(), header.replace(' ', ""));
        assert_eq!(&bytes[110..124], b"init\0\0hello\0\0\0");
        assert_eq!(bytes.len() % 4, 0);
    }

    #[test]
    fn directories_come_before_their_entries_and_only_once() {
        let mut archive = Archive::new();
        archive.file("a/b/one", 0o644, b"");
        archive.file("a/b/two", 0o644, b"");
        let bytes = archive.finish();
        let text = String::from_utf8_lossy(&bytes);
        let names: Vec<&str> =
            text.split("070701").skip(1).map(|entry| entry[104..].trim_end_matches('\0')).collect();
        assert_eq!(names, ["a", "a/b", "a/b/one", "a/b/two", "TRAILER!!!"]);
    }
}
