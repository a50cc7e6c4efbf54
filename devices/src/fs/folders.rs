//! The requests that read directories.
//!
//! A READDIRPLUS reply contains each entry's attributes along with its name, and counts as a lookup of the entry. An
//! entry that cannot be looked up is returned without attributes. One that is not there any more, or that the guest
//! does not see, is left out.

use std::mem::MaybeUninit;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;

use rustix::fs::{FileType, RawDir, SeekFrom};
use rustix::io::Errno;
use vm_memory::ByteValued;

use super::Server;
use super::host;
use super::message::{Body, Name, Reply};
use super::wire::{Dirent, EntryOut, FsyncIn, OpenOut, ROOT, ReadIn, ReleaseIn};

/// The data that a request reads of each entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entries {
    Names,
    NamesAndAttributes,
}

/// Sizes of the buffer for `getdents64`. An entry has at most 280 bytes.
const BUFFER_SIZES: RangeInclusive<usize> = 1024..=8192;
/// With its attributes, an entry takes some four times as much in the reply as in that buffer. The host is not asked
/// for more than the reply takes, as it would be asked for the rest again.
const ATTRIBUTES: usize = 4;

impl Server {
    pub(super) fn open_directory(&mut self, node: u64, reply: &mut Reply) -> Result<(), Errno> {
        reply.require(size_of::<OpenOut>())?;
        self.handles.check_limit()?;
        let path_fd = self.nodes.path_fd(node)?;
        let directory = self.host.open_directory(&path_fd)?;
        let fh = self.handles.add_directory(directory, node, path_fd);
        reply.put(OpenOut { fh, ..OpenOut::default() }.as_slice())
    }

    pub(super) fn read_directory(
        &mut self,
        node: u64,
        what: Entries,
        body: &mut Body,
        reply: &mut Reply,
    ) -> Result<(), Errno> {
        let input: ReadIn = body.take()?;
        let directory = self.handles.directory(input.fh, node)?;
        reply.limit(input.size as usize);
        rustix::fs::seek(&directory, SeekFrom::Start(host::checked_offset(input.offset, 0)?))?;
        let remaining = reply.remaining();
        match self.put_entries(node, &directory, what, reply) {
            // The entries in the reply so far count as looked up, so they must be sent. The guest requests the rest
            // again.
            Err(_) if reply.remaining() < remaining => Ok(()),
            result => result,
        }
    }

    fn put_entries(
        &mut self,
        node: u64,
        directory: &OwnedFd,
        what: Entries,
        reply: &mut Reply,
    ) -> Result<(), Errno> {
        if self.nodes.are_places() {
            // What the guest sees of a directory that it has forgotten cannot be told.
            self.nodes.path_fd(node)?;
        }
        let stat = host::stat(directory)?;
        let device = (stat.stx_dev_major, stat.stx_dev_minor);
        let mut buffer = [MaybeUninit::uninit(); *BUFFER_SIZES.end()];
        let size = match what {
            Entries::Names => buffer.len(),
            Entries::NamesAndAttributes => {
                (reply.remaining() / ATTRIBUTES).clamp(*BUFFER_SIZES.start(), *BUFFER_SIZES.end())
            }
        };
        let mut entries = RawDir::new(directory, &mut buffer[..size]);
        while let Some(entry) = entries.next() {
            let entry = entry?;
            let name = entry.file_name();
            let bytes = name.to_bytes();
            // Hides the inode number of the directory above the share.
            let inode = if bytes == b".." && node == ROOT { stat.stx_ino } else { entry.ino() };
            let dirent = Dirent {
                ino: self.nodes.guest_inode(device, inode),
                off: entry.next_entry_cookie(),
                namelen: u32::try_from(bytes.len()).map_err(|_| Errno::OVERFLOW)?,
                kind: kind(entry.file_type()),
            };
            let dots = [b".".as_slice(), b".."].contains(&bytes);
            if what == Entries::Names && !dots && !self.nodes.sees(node, Name::new(name)?) {
                continue;
            }
            let padding = bytes.len().next_multiple_of(8) - bytes.len();
            let attributes = if what == Entries::Names { 0 } else { size_of::<EntryOut>() };
            if attributes + size_of::<Dirent>() + bytes.len() + padding > reply.remaining() {
                return Err(Errno::INVAL);
            }
            if what == Entries::NamesAndAttributes {
                let found = match Name::new(name).and_then(|name| self.nodes.look_up(node, name)) {
                    Ok((id, stat)) => self.entry(id, &stat),
                    Err(error) if self.nodes.are_places() && error != Errno::ACCESS => continue,
                    Err(_) => EntryOut::default(),
                };
                reply.put(found.as_slice())?;
            }
            reply.put(dirent.as_slice())?;
            reply.put(bytes)?;
            reply.put(&[0; 8][..padding])?;
        }
        Ok(())
    }

    pub(super) fn sync_directory(&mut self, node: u64, body: &mut Body) -> Result<(), Errno> {
        let input: FsyncIn = body.take()?;
        let directory = self.handles.directory(input.fh, node)?;
        self.sync_to_disk(&*directory, input.flags)
    }

    /// Handles RELEASE and RELEASEDIR.
    pub(super) fn release(&mut self, body: &mut Body) -> Result<(), Errno> {
        let input: ReleaseIn = body.take()?;
        self.handles.close(input.fh)
    }
}

/// Returns the value for `d_type` (readdir(3)): the file type bits of the mode, or 0 (`DT_UNKNOWN`).
fn kind(kind: FileType) -> u32 {
    if kind == FileType::Unknown { 0 } else { kind.as_raw_mode() >> 12 }
}
