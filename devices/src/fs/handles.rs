//! The guest's open files and directories. A handle keeps the path descriptor of its inode open.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;

use super::host::PathFd;

#[derive(Debug)]
enum Kind {
    File(Arc<File>),
    Directory(Arc<OwnedFd>),
}

#[derive(Debug)]
struct Handle {
    kind: Kind,
    node: u64,
    /// Never read. [`super::nodes`] keeps a path descriptor open while there are other references to it. Without this
    /// reference, the descriptor of an unlinked file could be closed, and the file could not be found again by name.
    _path_fd: Arc<PathFd>,
}

/// The table of open handles. Handle numbers are never reused.
#[derive(Debug)]
pub struct Handles {
    limit: usize,
    last: u64,
    open: HashMap<u64, Handle>,
}

impl Handles {
    /// Number of file descriptors per handle: its own, and the path descriptor, of which it may hold the last
    /// reference.
    pub const DESCRIPTORS: usize = 2;

    /// Creates a table for at most `limit` handles.
    pub fn new(limit: usize) -> Self {
        Self { limit, last: 0, open: HashMap::new() }
    }

    pub fn clear(&mut self) {
        self.open.clear();
    }

    /// Fails if the table is full. Must be called before anything is opened.
    pub fn check_limit(&self) -> Result<(), Errno> {
        if self.open.len() < self.limit { Ok(()) } else { Err(Errno::NFILE) }
    }

    pub fn add_file(&mut self, file: File, node: u64, path_fd: Arc<PathFd>) -> u64 {
        self.add(Handle { kind: Kind::File(file.into()), node, _path_fd: path_fd })
    }

    pub fn add_directory(&mut self, directory: OwnedFd, node: u64, path_fd: Arc<PathFd>) -> u64 {
        self.add(Handle { kind: Kind::Directory(directory.into()), node, _path_fd: path_fd })
    }

    fn add(&mut self, handle: Handle) -> u64 {
        self.last += 1;
        self.open.insert(self.last, handle);
        self.last
    }

    /// Returns the open file of a handle. Fails if the handle is not an open file of `node`.
    pub fn file(&self, handle: u64, node: u64) -> Result<Arc<File>, Errno> {
        match self.open.get(&handle) {
            Some(Handle { kind: Kind::File(file), node: of, .. }) if *of == node => Ok(Arc::clone(file)),
            _ => Err(Errno::BADF),
        }
    }

    /// Returns the open directory of a handle. Fails if the handle is not an open directory of `node`.
    pub fn directory(&self, handle: u64, node: u64) -> Result<Arc<OwnedFd>, Errno> {
        match self.open.get(&handle) {
            Some(Handle { kind: Kind::Directory(directory), node: of, .. }) if *of == node => {
                Ok(Arc::clone(directory))
            }
            _ => Err(Errno::BADF),
        }
    }

    pub fn close(&mut self, handle: u64) -> Result<(), Errno> {
        self.open.remove(&handle).map(drop).ok_or(Errno::BADF)
    }
}
