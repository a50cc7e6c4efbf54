//! Reads files straight into a guest's buffers, and writes them straight from there: the host's kernel copies the
//! content, once.
//!
//! The registers are locked meanwhile, as for each access to the buffers. So callers ask only for what does not wait
//! for a disk: what is in memory, with `RWF_NOWAIT` or because of the file system that it is on.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;

use libc::{c_int, iovec, off_t};
use rustix::io::ReadWriteFlags;

use super::{Buffers, PIECE, Reader, Writer};

/// Maximum number of buffers of a system call. A piece of pages that are nowhere side by side needs 33.
const MAX_BUFFERS: usize = 40;

/// What a system call has transferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moved {
    /// The number of bytes.
    pub bytes: usize,
    /// There was room for more.
    pub is_short: bool,
}

/// Parts of the guest's memory for a system call.
struct Parts {
    all: [iovec; MAX_BUFFERS],
    number: usize,
}

impl Parts {
    /// Returns the number of parts, as system calls take it.
    fn number(&self) -> c_int {
        c_int::try_from(self.number).expect("they are few")
    }

    /// Returns the number of bytes.
    fn bytes(&self) -> usize {
        self.all[..self.number].iter().map(|part| part.iov_len).sum()
    }

    /// Adds a part, to the last one if it is right behind that. Returns false if there are too many.
    fn add(&mut self, start: *mut u8, length: usize) -> bool {
        let last = self.number.checked_sub(1).and_then(|last| self.all.get_mut(last));
        if let Some(last) = last.filter(|last| last.iov_base.addr() + last.iov_len == start.addr()) {
            last.iov_len += length;
            return true;
        }
        let Some(next) = self.all.get_mut(self.number) else { return false };
        *next = iovec { iov_base: start.cast(), iov_len: length };
        self.number += 1;
        true
    }
}

impl Buffers<'_> {
    /// Calls `transfer` with the next buffers, up to `count` bytes and a piece, while the registers are locked. It
    /// returns the number of bytes that it has transferred, or a negative number after an error.
    fn transfer(&mut self, count: usize, transfer: impl FnOnce(&Parts) -> isize) -> io::Result<Moved> {
        let parts = self.parts(count.min(PIECE));
        let done = self.session.access(|| match usize::try_from(transfer(&parts)) {
            Ok(done) => Ok(done),
            Err(_) => Err(io::Error::last_os_error()),
        })??;
        self.skip(done);
        Ok(Moved { bytes: done, is_short: done < parts.bytes() })
    }

    fn parts(&self, count: usize) -> Parts {
        let none = iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        let (mut parts, mut rest) = (Parts { all: [none; MAX_BUFFERS], number: 0 }, count);
        for slice in &self.slices {
            let length = slice.len().min(rest);
            // A guard is only for Xen, where memory is mapped by parts.
            if rest == 0 || !parts.add(slice.ptr_guard_mut().as_ptr(), length) {
                break;
            }
            rest -= length;
        }
        parts
    }

    /// Removes the next `count` bytes.
    fn skip(&mut self, count: usize) {
        let mut rest = count;
        while rest > 0 {
            let Some(slice) = self.slices.pop_front() else { break };
            let now = slice.len().min(rest);
            let (_, later) = slice.split_at(now).expect("within the slice");
            if !later.is_empty() {
                self.slices.push_front(later);
            }
            (rest, self.available) = (rest - now, self.available - now);
        }
    }
}

impl Writer<'_> {
    /// Reads from a file into the next buffers: up to `count` bytes, and no more than one piece. Returns what it has
    /// read, nothing at the end of the file.
    pub fn read_from(
        &mut self,
        file: &File,
        offset: u64,
        count: usize,
        flags: ReadWriteFlags,
    ) -> io::Result<Moved> {
        let (file, offset, flags) = arguments(file, offset, flags)?;
        self.0.transfer(count, |parts| {
            // SAFETY: Each part is of the guest's memory, which stays mapped while the transport is borrowed. As with
            // all that devices write there, any bytes are valid, and nothing has a reference to it.
            unsafe { libc::preadv2(file, parts.all.as_ptr(), parts.number(), offset, flags) }
        })
    }
}

impl Reader<'_> {
    /// Writes to a file from the next buffers: up to `count` bytes, and no more than one piece. Returns what it has
    /// written.
    pub fn write_to(
        &mut self,
        file: &File,
        offset: u64,
        count: usize,
        flags: ReadWriteFlags,
    ) -> io::Result<Moved> {
        let (file, offset, flags) = arguments(file, offset, flags)?;
        self.0.transfer(count, |parts| {
            // SAFETY: Each part is of the guest's memory, which stays mapped while the transport is borrowed. It is
            // only read.
            unsafe { libc::pwritev2(file, parts.all.as_ptr(), parts.number(), offset, flags) }
        })
    }
}

fn arguments(file: &File, offset: u64, flags: ReadWriteFlags) -> io::Result<(c_int, off_t, c_int)> {
    let offset = off_t::try_from(offset).map_err(|_| ErrorKind::InvalidInput)?;
    Ok((file.as_raw_fd(), offset, flags.bits().cast_signed()))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::super::super::testing::Driver;
    use super::*;
    use crate::virtio::{Console, Queues};

    const CONTROL: usize = 3;
    /// Not every file system of a machine that runs this can do without waiting.
    const PLAIN: ReadWriteFlags = ReadWriteFlags::empty();

    fn file(content: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(content).unwrap();
        file
    }

    /// Calls `work` with a request of `request` and a reply of this size. Returns what is in the reply's buffer then.
    fn with_request(
        request: &[u8],
        reply_size: u32,
        work: impl FnOnce(&Driver, &mut crate::virtio::Request),
    ) -> Vec<u8> {
        let mut console = Console::new(1);
        let mut driver = Driver::ready(&console);
        let at = driver.submit(CONTROL, request, reply_size);
        driver.transport.serve(&mut console, |_, queues: &mut Queues| {
            work(&driver, &mut queues.pop(CONTROL).unwrap());
        });
        driver.bytes(at, reply_size)
    }

    #[test]
    fn a_file_is_read_into_the_buffers_up_to_its_end() {
        let file = file(b"the content");
        let reply = with_request(b"", 20, |_, request| {
            let writer = &mut request.writer;
            assert_eq!(writer.read_from(&file, 4, 3, PLAIN).unwrap(), Moved { bytes: 3, is_short: false });
            assert_eq!(writer.available_bytes(), 17);
            assert_eq!(writer.read_from(&file, 7, 100, PLAIN).unwrap(), Moved { bytes: 4, is_short: true });
            assert_eq!(writer.read_from(&file, 11, 100, PLAIN).unwrap(), Moved { bytes: 0, is_short: true });
        });
        assert_eq!(reply, b"content\0\0\0\0\0\0\0\0\0\0\0\0\0");
    }

    #[test]
    fn a_piece_at_a_time_is_transferred() {
        let file = file(&vec![7; 2 * PIECE]);
        let reply = with_request(b"", u32::try_from(2 * PIECE).unwrap(), |_, request| {
            let piece = Moved { bytes: PIECE, is_short: false };
            assert_eq!(request.writer.read_from(&file, 0, usize::MAX, PLAIN).unwrap(), piece);
        });
        assert_eq!((reply[PIECE - 1], reply[PIECE]), (7, 0));
    }

    #[test]
    fn the_buffers_are_written_to_a_file() {
        let file = file(b"the content");
        with_request(b"no more", 0, |_, request| {
            assert_eq!(request.reader.write_to(&file, 0, 2, PLAIN).unwrap().bytes, 2);
            assert_eq!(request.reader.write_to(&file, 3, 100, PLAIN).unwrap().bytes, 5);
            assert_eq!(request.reader.available_bytes(), 0);
        });
        let mut content = [0; 12];
        let length = rustix::io::pread(&file, &mut content, 0).unwrap();
        assert_eq!(&content[..length], b"noe moreent");
    }

    #[test]
    fn nothing_is_transferred_after_a_reset() {
        let file = file(b"the content");
        let reply = with_request(b"request", 8, |driver, request| {
            driver.write(0x70, 0);
            let reset = |done: io::Result<Moved>| done.unwrap_err().kind() == ErrorKind::ConnectionReset;
            assert!(reset(request.writer.read_from(&file, 0, 8, PLAIN)));
            assert!(reset(request.reader.write_to(&file, 0, 7, PLAIN)));
        });
        assert_eq!(reply, [0; 8]);
        assert_eq!(file.metadata().unwrap().len(), 11);
    }

    #[test]
    fn parts_side_by_side_are_one() {
        let mut memory = [0_u8; 8];
        let start = memory.as_mut_ptr();
        let none = iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        let mut parts = Parts { all: [none; MAX_BUFFERS], number: 0 };
        assert!(
            parts.add(start, 2) && parts.add(start.wrapping_add(2), 1) && parts.add(start.wrapping_add(4), 1)
        );
        assert_eq!((parts.number, parts.all[0].iov_len, parts.all[1].iov_len), (2, 3, 1));
        assert!((2..MAX_BUFFERS).all(|_| parts.add(start, 1)) && !parts.add(start, 1));
    }
}
