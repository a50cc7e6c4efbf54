//! The guest's open files and directories. A handle keeps the path descriptor of its inode open.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use rustix::io::{Errno, ReadWriteFlags};
use serde::{Deserialize, Serialize};

use super::host::{self, PathFd};

#[derive(Debug)]
enum Kind {
    /// With the access mode, as in open(2).
    File(Arc<OpenFile>, u32),
    Directory(Arc<OwnedFd>),
}

/// An open regular file.
#[derive(Debug)]
pub struct OpenFile {
    file: File,
    /// See [`Self::is_in_memory`].
    is_in_memory: OnceLock<bool>,
}

impl OpenFile {
    /// Returns true if this file is only in memory, as far as that can be told: a read that gets less than there is
    /// room for has reached its end.
    pub fn is_in_memory(&self) -> bool {
        *self.is_in_memory.get_or_init(|| host::is_in_memory(&self.file).unwrap_or(false))
    }

    /// Returns the flags with which reading and writing this file does not wait for a disk. Fails then if it had to. A
    /// file in memory has no disk: at most it was swapped out, as any memory may be.
    pub fn at_once(&self) -> ReadWriteFlags {
        if self.is_in_memory() { ReadWriteFlags::empty() } else { ReadWriteFlags::NOWAIT }
    }
}

impl Deref for OpenFile {
    type Target = File;

    fn deref(&self) -> &File {
        &self.file
    }
}

impl AsFd for OpenFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// An open file or directory in a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HandleState {
    pub number: u64,
    pub node: u64,
    /// The access mode of a file, as in open(2). A directory has none.
    pub mode: Option<u32>,
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

    /// Adds a file that was opened with an access mode, as in open(2). Returns the number of its handle.
    pub fn add_file(&mut self, file: File, mode: u32, node: u64, path_fd: Arc<PathFd>) -> u64 {
        self.last += 1;
        self.put_file(self.last, file, mode, node, path_fd);
        self.last
    }

    pub fn add_directory(&mut self, directory: OwnedFd, node: u64, path_fd: Arc<PathFd>) -> u64 {
        self.last += 1;
        self.put_directory(self.last, directory, node, path_fd);
        self.last
    }

    /// Adds a file with the number that its handle had.
    pub fn put_file(&mut self, number: u64, file: File, mode: u32, node: u64, path_fd: Arc<PathFd>) {
        let file = OpenFile { file, is_in_memory: OnceLock::new() };
        self.open.insert(number, Handle { kind: Kind::File(file.into(), mode), node, _path_fd: path_fd });
    }

    /// Adds a directory with the number that its handle had.
    pub fn put_directory(&mut self, number: u64, directory: OwnedFd, node: u64, path_fd: Arc<PathFd>) {
        let kind = Kind::Directory(directory.into());
        self.open.insert(number, Handle { kind, node, _path_fd: path_fd });
    }

    /// Returns what is open, in the order of the numbers, and the last number that was given.
    pub fn save(&self) -> (Vec<HandleState>, u64) {
        let state = |(number, Handle { kind, node, .. }): (&u64, &Handle)| HandleState {
            number: *number,
            node: *node,
            mode: match kind {
                Kind::File(_, mode) => Some(*mode),
                Kind::Directory(_) => None,
            },
        };
        let mut open: Vec<HandleState> = self.open.iter().map(state).collect();
        open.sort_by_key(|handle| handle.number);
        (open, self.last)
    }

    /// Closes everything. The next handle gets the number behind `last`.
    pub fn begin_after(&mut self, last: u64) {
        self.clear();
        self.last = last;
    }

    /// Returns the open file of a handle. Fails if the handle is not an open file of `node`.
    pub fn file(&self, handle: u64, node: u64) -> Result<Arc<OpenFile>, Errno> {
        match self.open.get(&handle) {
            Some(Handle { kind: Kind::File(file, _), node: of, .. }) if *of == node => Ok(Arc::clone(file)),
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
