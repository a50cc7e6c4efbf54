//! What READ and WRITE transfer, for those who can do it straight between the file and the guest's memory.
//!
//! [`Share::serve`] has the content of files in a buffer of this process, which costs a second copy. It remains for
//! what the host has to fetch from a disk, as nobody may wait for that while the guest's memory is accessed.

use std::sync::Arc;

use rustix::fs::OFlags;
use rustix::io::{Errno, ReadWriteFlags};
use vm_memory::ByteValued;

use super::files;
use super::handles::OpenFile;
use super::host::checked_offset;
use super::message::{Body, MAX_TRANSFER};
use super::wire::{InHeader, OutHeader, ReadIn, WRITE_CACHE, WriteIn, WriteOut, op};
use super::{Server, Share};

/// A part of an open file, which a request of the guest reads or writes.
#[derive(Debug)]
pub struct Transfer {
    /// The file.
    pub file: Arc<OpenFile>,
    /// Where the part begins. It ends within the maximum size of a file.
    pub offset: u64,
    /// Length of the part.
    pub len: usize,
    /// `RWF_APPEND`, or nothing.
    pub flags: ReadWriteFlags,
    unique: u64,
}

impl Transfer {
    /// Returns the flags for a transfer that does not wait for a disk.
    pub fn at_once(&self) -> ReadWriteFlags {
        self.flags | self.file.at_once()
    }
}

impl Share {
    /// Length of the header of a reply.
    pub const REPLY_HEADER: usize = size_of::<OutHeader>();
    /// Length of what precedes the data of a WRITE.
    pub const WRITE_HEADER: usize = size_of::<InHeader>() + size_of::<WriteIn>();

    /// Returns what a READ reads into a reply of at most `max_len` bytes. Returns nothing for other requests and for
    /// those that fail.
    pub fn reading(&self, request: &[u8], max_len: usize) -> Option<Transfer> {
        let (header, mut body) = split(request).filter(|(header, _)| header.opcode == op::READ)?;
        let room = max_len.checked_sub(Self::REPLY_HEADER)?.min(MAX_TRANSFER);
        self.server.reading(&header, &mut body, room).ok()
    }

    /// Returns what a WRITE of `len` bytes writes that begins with `request`, if its reply has room in `max_len` bytes.
    /// Returns nothing for other requests and for those that fail.
    pub fn writing(&self, request: &[u8], len: usize, max_len: usize) -> Option<Transfer> {
        let mut body = Body(request);
        let header: InHeader = body.take().ok().filter(|header: &InHeader| header.opcode == op::WRITE)?;
        let room = (header.len as usize).min(len).checked_sub(Self::WRITE_HEADER)?;
        let writing = self.server.writing(&header, &mut body).ok()?;
        (writing.len <= room && max_len >= Self::REPLY_HEADER + size_of::<WriteOut>()).then_some(writing)
    }

    /// Reads what is left of a READ behind its first `done` bytes, which may take long.
    pub fn read_rest(&mut self, reading: &Transfer, done: usize) -> Result<&[u8], Errno> {
        self.reply.begin(usize::MAX);
        let (file, offset) = (&*reading.file, reading.offset + done as u64);
        self.reply.fill(reading.len - done, |buffer| files::read(file, buffer, offset))?;
        Ok(self.reply.body())
    }

    /// Writes what is left of a WRITE behind its first `done` bytes, which may take long. Returns the number of bytes.
    pub fn write_rest(writing: &Transfer, done: usize, data: &[u8]) -> Result<usize, Errno> {
        files::write(&writing.file, data, writing.offset + done as u64, writing.flags)
    }

    /// Returns the header of the reply to a READ that has read `done` bytes.
    pub fn read_header(reading: &Transfer, result: Result<usize, Errno>) -> [u8; Self::REPLY_HEADER] {
        let (len, error) = match result {
            Ok(done) => (Self::REPLY_HEADER + done, 0),
            Err(errno) => (Self::REPLY_HEADER, -errno.raw_os_error()),
        };
        let len = u32::try_from(len).expect("at most the maximum and a header");
        let mut bytes = [0; Self::REPLY_HEADER];
        bytes.copy_from_slice(OutHeader { len, error, unique: reading.unique }.as_slice());
        bytes
    }

    /// Returns the reply to a WRITE.
    pub fn write_reply(&mut self, writing: &Transfer, result: Result<usize, Errno>) -> &[u8] {
        self.reply.begin(usize::MAX);
        let result = result.and_then(|done| self.reply.put(files::write_out(done).as_slice()));
        self.reply.finish(writing.unique, result)
    }
}

impl Server {
    /// Decodes a READ into at most `room` bytes.
    pub(super) fn reading(&self, header: &InHeader, body: &mut Body, room: usize) -> Result<Transfer, Errno> {
        let input: ReadIn = body.take()?;
        let file = self.handles.file(input.fh, header.nodeid)?;
        let len = room.min(input.size as usize);
        let offset = checked_offset(input.offset, len)?;
        Ok(Transfer { file, offset, len, flags: ReadWriteFlags::empty(), unique: header.unique })
    }

    /// Decodes what precedes the data of a WRITE.
    pub(super) fn writing(&self, header: &InHeader, body: &mut Body) -> Result<Transfer, Errno> {
        self.writable()?;
        let input: WriteIn = body.take()?;
        let file = self.handles.file(input.fh, header.nodeid)?;
        let len = input.size as usize;
        if len > MAX_TRANSFER {
            return Err(Errno::INVAL);
        }
        let offset = checked_offset(input.offset, len)?;
        // The host may have changed the size of the file, so `O_APPEND` must be applied on the host. Writes from the
        // guest's page cache already have their final offset.
        let appends = OFlags::from_bits_retain(input.flags).contains(OFlags::APPEND);
        let flags = if appends && input.write_flags & WRITE_CACHE == 0 {
            ReadWriteFlags::APPEND
        } else {
            ReadWriteFlags::empty()
        };
        Ok(Transfer { file, offset, len, flags, unique: header.unique })
    }
}

/// Returns the header and the body of a request, or nothing if it is shorter than it says.
pub fn split(request: &[u8]) -> Option<(InHeader, Body<'_>)> {
    let header: InHeader = Body(request).take().ok()?;
    let body = request.get(size_of::<InHeader>()..header.len as usize)?;
    Some((header, Body(body)))
}
