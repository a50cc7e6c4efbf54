//! The requests that read folders, in pieces of what fits into one answer.
//!
//! Linux's READDIRPLUS asks for each entry's attributes along with its name, and takes it as looked up. An entry that cannot be
//! looked up is told without them.

use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

use rustix::fs::{FileType, RawDir, SeekFrom};
use rustix::io::Errno;
use vm_memory::ByteValued;

use super::Server;
use super::host;
use super::message::{Body, Name, Reply};
use super::wire::{Dirent, EntryOut, FDATASYNC, FsyncIn, OpenOut, ROOT, ReadIn, ReleaseIn};

/// What a request reads of each entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entries {
    Names,
    NamesAndAttributes,
}

/// How much the host is asked for at once. One entry has 280 bytes at most.
const PIECE: usize = 8192;

impl Server {
    pub(super) fn open_folder(&mut self, node: u64, reply: &mut Reply) -> Result<(), Errno> {
        self.handles.room()?;
        let place = self.nodes.place(node)?;
        let folder = self.host.open_folder(&place)?;
        let fh = self.handles.add_folder(folder, node, place);
        reply.put(OpenOut { fh, ..OpenOut::default() }.as_slice())
    }

    pub(super) fn read_folder(
        &mut self,
        node: u64,
        what: Entries,
        body: &mut Body,
        reply: &mut Reply,
    ) -> Result<(), Errno> {
        let input: ReadIn = body.take()?;
        let folder = self.handles.folder(input.fh, node)?;
        reply.limit(input.size as usize);
        rustix::fs::seek(&folder, SeekFrom::Start(host::within_a_file(input.offset, 0)?))?;
        let before = reply.room();
        match self.put_entries(node, &folder, what, reply) {
            // What there is so far has been looked up; the rest is asked for again.
            Err(_) if reply.room() < before => Ok(()),
            result => result,
        }
    }

    fn put_entries(
        &mut self,
        node: u64,
        folder: &OwnedFd,
        what: Entries,
        reply: &mut Reply,
    ) -> Result<(), Errno> {
        let stat = host::stat(folder)?;
        let device = (stat.stx_dev_major, stat.stx_dev_minor);
        let mut piece = [MaybeUninit::uninit(); PIECE];
        let mut entries = RawDir::new(folder, &mut piece);
        while let Some(entry) = entries.next() {
            let entry = entry?;
            let name = entry.file_name();
            let bytes = name.to_bytes();
            // What lies above the share is nobody's business.
            let inode = if bytes == b".." && node == ROOT { stat.stx_ino } else { entry.ino() };
            let dirent = Dirent {
                ino: self.nodes.shown_inode(device, inode),
                off: entry.next_entry_cookie(),
                namelen: u32::try_from(bytes.len()).map_err(|_| Errno::OVERFLOW)?,
                kind: kind(entry.file_type()),
            };
            let padding = bytes.len().next_multiple_of(8) - bytes.len();
            let attributes = if what == Entries::Names { 0 } else { size_of::<EntryOut>() };
            if attributes + size_of::<Dirent>() + bytes.len() + padding > reply.room() {
                return Err(Errno::INVAL);
            }
            if what == Entries::NamesAndAttributes {
                let found = match Name::new(name).and_then(|name| self.nodes.look_up(node, name)) {
                    Ok((number, stat)) => self.entry(number, &stat),
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

    pub(super) fn sync_folder(&mut self, node: u64, body: &mut Body) -> Result<(), Errno> {
        let input: FsyncIn = body.take()?;
        let folder = self.handles.folder(input.fh, node)?;
        if input.flags & FDATASYNC == 0 { rustix::fs::fsync(&folder) } else { rustix::fs::fdatasync(&folder) }
    }

    /// Of files and of folders.
    pub(super) fn release(&mut self, body: &mut Body) -> Result<(), Errno> {
        let input: ReleaseIn = body.take()?;
        self.handles.close(input.fh)
    }
}

/// As readdir(3) has it: the kind's bits of the mode, 0 for unknown.
fn kind(kind: FileType) -> u32 {
    if kind == FileType::Unknown { 0 } else { kind.as_raw_mode() >> 12 }
}
