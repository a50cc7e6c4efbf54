//! A request taken apart and an answer put together. Both are bytes in our memory: a guest that changes its own while it waits
//! changes nothing here.

use std::ffi::CStr;

use rustix::io::Errno;
use vm_memory::ByteValued;

use super::wire::OutHeader;

/// The most bytes that one READ or WRITE moves; 256 pages, Linux's own limit.
pub const MOST: usize = 1 << 20;

const HEADER: usize = size_of::<OutHeader>();

/// What is still to be read of a request.
#[derive(Debug)]
pub struct Body<'a>(pub &'a [u8]);

impl<'a> Body<'a> {
    /// The next bytes, as a structure.
    pub fn take<T: ByteValued + Default>(&mut self) -> Result<T, Errno> {
        let mut value = T::default();
        let bytes = value.as_mut_slice();
        bytes.copy_from_slice(self.bytes(bytes.len())?);
        Ok(value)
    }

    /// That many of the next bytes.
    pub fn bytes(&mut self, len: usize) -> Result<&'a [u8], Errno> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or(Errno::INVAL)?;
        self.0 = rest;
        Ok(taken)
    }

    /// The text up to the next NUL.
    pub fn text(&mut self) -> Result<&'a CStr, Errno> {
        let text = CStr::from_bytes_until_nul(self.0).map_err(|_| Errno::INVAL)?;
        self.bytes(text.to_bytes_with_nul().len())?;
        Ok(text)
    }

    /// The name up to the next NUL.
    pub fn name(&mut self) -> Result<Name<'a>, Errno> {
        Name::new(self.text()?)
    }
}

/// The name of something in a folder: never a path, and never a way up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Name<'a>(&'a CStr);

impl<'a> Name<'a> {
    const LONGEST: usize = 255;

    /// The name, if it is one.
    pub fn new(text: &'a CStr) -> Result<Self, Errno> {
        match text.to_bytes() {
            b"" | b"." | b".." => Err(Errno::INVAL),
            bytes if bytes.contains(&b'/') => Err(Errno::INVAL),
            bytes if bytes.len() > Self::LONGEST => Err(Errno::NAMETOOLONG),
            _ => Ok(Self(text)),
        }
    }

    /// For the system calls that take a path, which this is not more than one part of.
    pub fn as_c_str(self) -> &'a CStr {
        self.0
    }
}

/// The answer to a request. Its buffer is used again for the next one.
#[derive(Debug)]
pub struct Reply {
    buffer: Box<[u8]>,
    len: usize,
    room: usize,
}

impl Reply {
    pub fn new() -> Self {
        Self { buffer: vec![0; HEADER + MOST].into(), len: HEADER, room: HEADER }
    }

    /// Begins an answer that may have that many bytes, header and all.
    pub fn begin(&mut self, room: usize) {
        self.len = HEADER;
        self.room = room.min(self.buffer.len());
    }

    /// Leaves room for that many bytes more, if there was that much.
    pub fn limit(&mut self, most: usize) {
        self.room = self.room.min(self.len.saturating_add(most));
    }

    /// How many bytes more there is room for.
    pub fn room(&self) -> usize {
        self.room.saturating_sub(self.len)
    }

    /// Adds bytes.
    pub fn put(&mut self, bytes: &[u8]) -> Result<(), Errno> {
        self.fill(bytes.len(), |room| {
            // Less room than asked for means that the guest offers too little for an answer of this kind.
            let room = room.get_mut(..bytes.len()).ok_or(Errno::INVAL)?;
            room.copy_from_slice(bytes);
            Ok(bytes.len())
        })
    }

    /// Lets `read` fill at most that many bytes; it says how many it did.
    pub fn fill(
        &mut self,
        most: usize,
        read: impl FnOnce(&mut [u8]) -> Result<usize, Errno>,
    ) -> Result<(), Errno> {
        let most = most.min(self.room());
        let free = &mut self.buffer[self.len..];
        self.len += read(&mut free[..most])?;
        Ok(())
    }

    /// The whole answer; empty if there is no room for so much as its header.
    pub fn end(&mut self, unique: u64, result: Result<(), Errno>) -> &[u8] {
        if self.room < HEADER {
            return &[];
        }
        let error = match result {
            Ok(()) => 0,
            Err(errno) => {
                self.len = HEADER;
                -errno.raw_os_error()
            }
        };
        let len = u32::try_from(self.len).expect("the buffer is not that large");
        self.buffer[..HEADER].copy_from_slice(OutHeader { len, error, unique }.as_slice());
        &self.buffer[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_never_a_path_or_a_way_up() {
        for bad in [c"", c".", c"..", c"/", c"a/b", c"../x", c"/etc/passwd", c"a/"] {
            assert_eq!(Name::new(bad), Err(Errno::INVAL), "{bad:?}");
        }
        for good in [c"a", c"...", c"..a", c" ", c"\\", c"\xff\xfe"] {
            assert!(Name::new(good).is_ok(), "{good:?}");
        }
    }

    #[test]
    fn a_name_without_its_end_is_refused() {
        assert_eq!(Body(b"name").name(), Err(Errno::INVAL));
        assert_eq!(Body(b"").name(), Err(Errno::INVAL));
    }

    #[test]
    fn a_name_has_255_bytes_at_most() {
        let mut body = vec![b'x'; 256];
        body[255] = 0;
        assert!(Body(&body).name().is_ok());
        body[255] = b'x';
        body.push(0);
        assert_eq!(Body(&body).name(), Err(Errno::NAMETOOLONG));
    }

    #[test]
    fn an_answer_keeps_to_its_room() {
        let mut reply = Reply::new();
        reply.begin(20);
        assert_eq!(reply.put(&[1; 5]), Err(Errno::INVAL));
        assert_eq!(reply.put(&[1; 4]), Ok(()));
        assert_eq!(reply.end(7, Ok(())).len(), 20);
        reply.begin(15);
        assert_eq!(reply.end(7, Ok(())), b"");
    }
}
