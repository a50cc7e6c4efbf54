//! The requests that open, read and write regular files.

use std::io::IoSlice;
use std::os::fd::AsFd;

use rustix::fs::{Access, FallocateFlags, OFlags, SeekFrom};
use rustix::io::{Errno, ReadWriteFlags};
use vm_memory::ByteValued;

use super::Server;
use super::handles::OpenFile;
use super::host::{Host, OpenMode, checked_offset};
use super::message::{Body, Reply};
use super::wire::{
    AccessIn, CreateIn, EntryOut, FDATASYNC, FallocateIn, FsyncIn, InHeader, KEEP_CACHE, LseekIn, LseekOut,
    OpenIn, OpenOut, WriteOut,
};

const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;

impl Server {
    pub(super) fn open_mode(&self, flags: u32) -> Result<OpenMode, Errno> {
        match OFlags::from_bits_retain(flags) & OFlags::RWMODE {
            OFlags::RDONLY => Ok(OpenMode::Read),
            OFlags::WRONLY => Ok(OpenMode::Write(self.writable()?)),
            OFlags::RDWR => Ok(OpenMode::ReadWrite(self.writable()?)),
            _ => Err(Errno::INVAL),
        }
    }

    pub(super) fn open(&mut self, node: u64, body: &mut Body, reply: &mut Reply) -> Result<(), Errno> {
        let input: OpenIn = body.take()?;
        let open_mode = self.open_mode(input.flags)?;
        reply.require(size_of::<OpenOut>())?;
        self.handles.check_limit()?;
        let (path_fd, file_type) = self.nodes.path_fd_and_type(node)?;
        // Of what the file is before it is opened, so that no later change is missed.
        let keeps = self.nodes.are_places() && self.kept.is_unchanged(node, &path_fd)?;
        let file = self.host.open_regular(file_type, &path_fd, open_mode)?;
        let open_flags = if keeps { KEEP_CACHE } else { 0 };
        let mode = input.flags & OFlags::RWMODE.bits();
        let fh = self.handles.add_file(file, mode, node, path_fd);
        reply.put(OpenOut { fh, open_flags, ..OpenOut::default() }.as_slice())
    }

    pub(super) fn create(&mut self, parent: u64, body: &mut Body, reply: &mut Reply) -> Result<(), Errno> {
        let writable = self.writable()?;
        let input: CreateIn = body.take()?;
        let name = body.name()?;
        let open_mode = self.open_mode(input.flags)?;
        let flags = OFlags::from_bits_retain(input.flags);
        reply.require(size_of::<EntryOut>() + size_of::<OpenOut>())?;
        self.handles.check_limit()?;
        let parent_fd = self.nodes.path_fd(parent)?;
        self.nodes.reserve(name)?;
        let (file, path_fd) = match Host::create(&parent_fd, name, input.mode, open_mode, writable) {
            Ok(file) => {
                let path_fd = self.host.path_fd_of(&file)?;
                (file, path_fd)
            }
            // The host has created this name in the meantime. It may not be a regular file, so it is opened like an
            // existing one.
            Err(Errno::EXIST) if !flags.contains(OFlags::EXCL) => {
                let path_fd = self.nodes.find(parent, name)?;
                self.nodes.identify_entry(&path_fd, parent)?;
                let file = self.host.open(&path_fd, open_mode)?;
                if flags.contains(OFlags::TRUNC) && !matches!(open_mode, OpenMode::Read) {
                    Host::set_size(writable, &file, 0)?;
                }
                (file, path_fd)
            }
            Err(errno) => return Err(errno),
        };
        let (node, stat) = self.nodes.register(path_fd, parent, name)?;
        let entry = self.entry(node, &stat);
        reply.put(entry.as_slice())?;
        let path_fd = self.nodes.path_fd(node)?;
        let fh = self.handles.add_file(file, input.flags & OFlags::RWMODE.bits(), node, path_fd);
        reply.put(OpenOut { fh, ..OpenOut::default() }.as_slice())
    }

    pub(super) fn read(
        &mut self,
        header: &InHeader,
        body: &mut Body,
        reply: &mut Reply,
    ) -> Result<(), Errno> {
        let reading = self.reading(header, body, reply.remaining())?;
        reply.fill(reading.len, |buffer| read(&reading.file, buffer, reading.offset))
    }

    pub(super) fn write(
        &mut self,
        header: &InHeader,
        body: &mut Body,
        reply: &mut Reply,
    ) -> Result<(), Errno> {
        let writing = self.writing(header, body)?;
        let data = body.bytes(writing.len)?;
        let done = write(&writing.file, data, writing.offset, writing.flags)?;
        reply.put(write_out(done).as_slice())
    }

    pub(super) fn sync(&mut self, node: u64, body: &mut Body) -> Result<(), Errno> {
        let input: FsyncIn = body.take()?;
        let file = self.handles.file(input.fh, node)?;
        self.sync_to_disk(&*file, input.flags)
    }

    /// Writes what the guest has written to disk. The guest of a read-only share has written nothing, and may not make
    /// the host write what others have written.
    pub(super) fn sync_to_disk(&self, what: impl AsFd, flags: u32) -> Result<(), Errno> {
        match self.access {
            super::Access::ReadOnly => Ok(()),
            super::Access::ReadWrite if flags & FDATASYNC == 0 => rustix::fs::fsync(what),
            super::Access::ReadWrite => rustix::fs::fdatasync(what),
        }
    }

    pub(super) fn allocate(&mut self, node: u64, body: &mut Body) -> Result<(), Errno> {
        self.writable()?;
        let input: FallocateIn = body.take()?;
        let file = self.handles.file(input.fh, node)?;
        let end = input.offset.checked_add(input.length).ok_or(Errno::INVAL)?;
        checked_offset(end, 0)?;
        let flags = FallocateFlags::from_bits_retain(input.mode);
        let known = FallocateFlags::KEEP_SIZE | FallocateFlags::PUNCH_HOLE | FallocateFlags::ZERO_RANGE;
        if !known.contains(flags) {
            return Err(Errno::OPNOTSUPP);
        }
        rustix::fs::fallocate(&file, flags, input.offset, input.length)
    }

    pub(super) fn seek(&mut self, node: u64, body: &mut Body, reply: &mut Reply) -> Result<(), Errno> {
        let input: LseekIn = body.take()?;
        let file = self.handles.file(input.fh, node)?;
        let offset = checked_offset(input.offset, 0)?;
        // The guest's kernel handles all other values of `whence` itself.
        let offset = match input.whence {
            SEEK_DATA => rustix::fs::seek(&file, SeekFrom::Data(offset))?,
            SEEK_HOLE => rustix::fs::seek(&file, SeekFrom::Hole(offset))?,
            _ => return Err(Errno::INVAL),
        };
        reply.put(LseekOut { offset }.as_slice())
    }

    pub(super) fn check_access(&mut self, node: u64, body: &mut Body) -> Result<(), Errno> {
        let input: AccessIn = body.take()?;
        let access = Access::from_bits(input.mask).ok_or(Errno::INVAL)?;
        let path_fd = self.nodes.path_fd(node)?;
        if access.contains(Access::WRITE_OK) {
            self.writable()?;
        }
        self.host.access(&path_fd, access)
    }
}

/// Fills a buffer with the content of a file, as far as there is any. The guest takes a short reply as the end of the
/// file.
pub fn read(file: &OpenFile, buffer: &mut [u8], offset: u64) -> Result<usize, Errno> {
    in_parts(buffer.len(), |done| rustix::io::pread(file, &mut buffer[done..], offset + done as u64))
}

/// Writes data to a file. Returns how much of it was written.
pub fn write(file: &OpenFile, data: &[u8], offset: u64, flags: ReadWriteFlags) -> Result<usize, Errno> {
    in_parts(data.len(), |done| {
        rustix::io::pwritev2(file, &[IoSlice::new(&data[done..])], offset + done as u64, flags)
    })
}

/// Continues a system call that transfers less than `len` bytes, until it transfers nothing or fails. Returns the
/// number of bytes, and the error if there are none.
fn in_parts(len: usize, mut call: impl FnMut(usize) -> Result<usize, Errno>) -> Result<usize, Errno> {
    let mut done = 0;
    while done < len {
        match call(done) {
            Ok(0) => break,
            Ok(more) => done += more,
            Err(Errno::INTR) => {}
            Err(_) if done > 0 => break,
            Err(errno) => return Err(errno),
        }
    }
    Ok(done)
}

/// Returns the reply to a write of `len` bytes.
pub fn write_out(len: usize) -> WriteOut {
    let size = u32::try_from(len).expect("at most the maximum size");
    WriteOut { size, ..WriteOut::default() }
}
