//! The requests that open, read and write regular files.

use std::fs::File;
use std::io::IoSlice;
use std::sync::Arc;

use rustix::fs::{Access, FallocateFlags, OFlags, SeekFrom};
use rustix::io::{Errno, ReadWriteFlags};
use vm_memory::ByteValued;

use super::Server;
use super::host::{Host, Open, Place, within_a_file};
use super::message::{Body, MOST, Reply};
use super::wire::{
    AccessIn, CreateIn, FDATASYNC, FallocateIn, FsyncIn, LseekIn, LseekOut, OpenIn, OpenOut, ReadIn,
    WRITE_CACHE, WriteIn, WriteOut,
};

const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;

impl Server {
    fn how(&self, flags: u32) -> Result<Open, Errno> {
        match OFlags::from_bits_retain(flags) & OFlags::RWMODE {
            OFlags::RDONLY => Ok(Open::Read),
            OFlags::WRONLY => Ok(Open::Write(self.writable()?)),
            OFlags::RDWR => Ok(Open::ReadWrite(self.writable()?)),
            _ => Err(Errno::INVAL),
        }
    }

    pub(super) fn open(&mut self, node: u64, body: &mut Body, reply: &mut Reply) -> Result<(), Errno> {
        let input: OpenIn = body.take()?;
        let how = self.how(input.flags)?;
        self.handles.room()?;
        let place = self.nodes.place(node)?;
        let file = self.host.open(&place, how)?;
        self.put_open(file, node, place, reply)
    }

    fn put_open(&mut self, file: File, node: u64, place: Arc<Place>, reply: &mut Reply) -> Result<(), Errno> {
        let fh = self.handles.add_file(file, node, place);
        reply.put(OpenOut { fh, ..OpenOut::default() }.as_slice())
    }

    pub(super) fn create(&mut self, folder: u64, body: &mut Body, reply: &mut Reply) -> Result<(), Errno> {
        let writable = self.writable()?;
        let input: CreateIn = body.take()?;
        let name = body.name()?;
        let how = self.how(input.flags)?;
        let flags = OFlags::from_bits_retain(input.flags);
        self.handles.room()?;
        let parent = self.nodes.place(folder)?;
        let (file, place) = match Host::create(&parent, name, input.mode, how, writable) {
            Ok(file) => {
                let place = self.host.place_of(&file)?;
                (file, place)
            }
            // The host was first. What it made may be no file, so it is opened as everything that is there.
            Err(Errno::EXIST) if !flags.contains(OFlags::EXCL) => {
                let place = Host::find(&parent, name)?;
                let file = self.host.open(&place, how)?;
                if flags.contains(OFlags::TRUNC) && !matches!(how, Open::Read) {
                    Host::set_size(writable, &file, 0)?;
                }
                (file, place)
            }
            Err(errno) => return Err(errno),
        };
        let (node, stat) = self.nodes.enter(place, folder, name)?;
        let entry = self.entry(node, &stat);
        reply.put(entry.as_slice())?;
        let place = self.nodes.place(node)?;
        self.put_open(file, node, place, reply)
    }

    pub(super) fn read(&mut self, node: u64, body: &mut Body, reply: &mut Reply) -> Result<(), Errno> {
        let input: ReadIn = body.take()?;
        let file = self.handles.file(input.fh, node)?;
        let most = reply.room().min(input.size as usize);
        let offset = within_a_file(input.offset, most)?;
        reply.fill(most, |buffer| {
            let mut len = 0;
            // The guest takes a short answer for the file's end, so only that may be one.
            while len < buffer.len() {
                match rustix::io::pread(&file, &mut buffer[len..], offset + len as u64) {
                    Ok(0) => break,
                    Ok(more) => len += more,
                    Err(Errno::INTR) => {}
                    Err(_) if len > 0 => break,
                    Err(errno) => return Err(errno),
                }
            }
            Ok(len)
        })
    }

    pub(super) fn write(&mut self, node: u64, body: &mut Body, reply: &mut Reply) -> Result<(), Errno> {
        self.writable()?;
        let input: WriteIn = body.take()?;
        let file = self.handles.file(input.fh, node)?;
        let data = body.bytes(input.size as usize)?;
        if data.len() > MOST {
            return Err(Errno::INVAL);
        }
        let offset = within_a_file(input.offset, data.len())?;
        // The end of the file may have moved since the guest looked. What its page cache writes has a place of its own, though.
        let appends = OFlags::from_bits_retain(input.flags).contains(OFlags::APPEND);
        let flags = if appends && input.write_flags & WRITE_CACHE == 0 {
            ReadWriteFlags::APPEND
        } else {
            ReadWriteFlags::empty()
        };
        let mut len = 0;
        while len < data.len() {
            match rustix::io::pwritev2(&file, &[IoSlice::new(&data[len..])], offset + len as u64, flags) {
                Ok(0) => break,
                Ok(more) => len += more,
                Err(Errno::INTR) => {}
                Err(_) if len > 0 => break,
                Err(errno) => return Err(errno),
            }
        }
        let size = u32::try_from(len).expect("as much as was asked for at most");
        reply.put(WriteOut { size, ..WriteOut::default() }.as_slice())
    }

    pub(super) fn sync(&mut self, node: u64, body: &mut Body) -> Result<(), Errno> {
        let input: FsyncIn = body.take()?;
        let file = self.handles.file(input.fh, node)?;
        if input.flags & FDATASYNC == 0 { rustix::fs::fsync(&file) } else { rustix::fs::fdatasync(&file) }
    }

    pub(super) fn allocate(&mut self, node: u64, body: &mut Body) -> Result<(), Errno> {
        self.writable()?;
        let input: FallocateIn = body.take()?;
        let file = self.handles.file(input.fh, node)?;
        let end = input.offset.checked_add(input.length).ok_or(Errno::INVAL)?;
        within_a_file(end, 0)?;
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
        let offset = within_a_file(input.offset, 0)?;
        // The guest knows of all other positions itself.
        let offset = match input.whence {
            SEEK_DATA => rustix::fs::seek(&file, SeekFrom::Data(offset))?,
            SEEK_HOLE => rustix::fs::seek(&file, SeekFrom::Hole(offset))?,
            _ => return Err(Errno::INVAL),
        };
        reply.put(LseekOut { offset }.as_slice())
    }

    pub(super) fn may_access(&mut self, node: u64, body: &mut Body) -> Result<(), Errno> {
        let input: AccessIn = body.take()?;
        let access = Access::from_bits(input.mask).ok_or(Errno::INVAL)?;
        let place = self.nodes.place(node)?;
        if access.contains(Access::WRITE_OK) {
            self.writable()?;
        }
        self.host.access(&place, access)
    }
}
