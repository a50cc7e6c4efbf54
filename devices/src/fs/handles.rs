//! What the guest has open. A handle is of one kind, and keeps the thing that it is of from being closed.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;

use super::host::Place;

#[derive(Debug)]
enum Kind {
    File(Arc<File>),
    Folder(Arc<OwnedFd>),
}

#[derive(Debug)]
struct Handle {
    kind: Kind,
    node: u64,
    /// See [`super::nodes`]: a thing that somebody else holds is not closed, for a file that has no name any more could not
    /// be found again.
    _place: Arc<Place>,
}

/// The table. Handles are not used again.
#[derive(Debug)]
pub struct Handles {
    most: usize,
    last: u64,
    open: HashMap<u64, Handle>,
}

impl Handles {
    /// How many descriptors each takes: its own, and the place's, which is perhaps nobody else's any more.
    pub const DESCRIPTORS: usize = 2;

    pub fn new(most: usize) -> Self {
        Self { most, last: 0, open: HashMap::new() }
    }

    pub fn clear(&mut self) {
        self.open.clear();
    }

    /// Whether there is room for one more; to be asked before anything is opened.
    pub fn room(&self) -> Result<(), Errno> {
        if self.open.len() < self.most { Ok(()) } else { Err(Errno::NFILE) }
    }

    pub fn add_file(&mut self, file: File, node: u64, place: Arc<Place>) -> u64 {
        self.add(Handle { kind: Kind::File(file.into()), node, _place: place })
    }

    pub fn add_folder(&mut self, folder: OwnedFd, node: u64, place: Arc<Place>) -> u64 {
        self.add(Handle { kind: Kind::Folder(folder.into()), node, _place: place })
    }

    fn add(&mut self, handle: Handle) -> u64 {
        self.last += 1;
        self.open.insert(self.last, handle);
        self.last
    }

    /// The open file of that handle, which must be one of that node.
    pub fn file(&self, handle: u64, node: u64) -> Result<Arc<File>, Errno> {
        match self.open.get(&handle) {
            Some(Handle { kind: Kind::File(file), node: of, .. }) if *of == node => Ok(Arc::clone(file)),
            _ => Err(Errno::BADF),
        }
    }

    /// The open folder of that handle, which must be one of that node.
    pub fn folder(&self, handle: u64, node: u64) -> Result<Arc<OwnedFd>, Errno> {
        match self.open.get(&handle) {
            Some(Handle { kind: Kind::Folder(folder), node: of, .. }) if *of == node => {
                Ok(Arc::clone(folder))
            }
            _ => Err(Errno::BADF),
        }
    }

    pub fn close(&mut self, handle: u64) -> Result<(), Errno> {
        self.open.remove(&handle).map(drop).ok_or(Errno::BADF)
    }
}
