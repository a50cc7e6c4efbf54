//! Decodes requests and encodes replies. Both are copies in the memory of this process, which the guest cannot change.

use std::ffi::CStr;

use rustix::io::Errno;
use vm_memory::ByteValued;

use super::wire::OutHeader;

/// Maximum number of bytes that one READ or WRITE transfers: 256 pages, Linux's limit.
pub const MAX_TRANSFER: usize = 1 << 20;

const HEADER: usize = size_of::<OutHeader>();

/// The part of a request that has not been decoded yet.
#[derive(Debug)]
pub struct Body<'a>(pub &'a [u8]);

impl<'a> Body<'a> {
    /// Decodes a structure.
    pub fn take<T: ByteValued + Default>(&mut self) -> Result<T, Errno> {
        let mut value = T::default();
        let bytes = value.as_mut_slice();
        bytes.copy_from_slice(self.bytes(bytes.len())?);
        Ok(value)
    }

    /// Takes `len` bytes.
    pub fn bytes(&mut self, len: usize) -> Result<&'a [u8], Errno> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or(Errno::INVAL)?;
        self.0 = rest;
        Ok(taken)
    }

    /// Takes a string up to the next NUL.
    pub fn text(&mut self) -> Result<&'a CStr, Errno> {
        let text = CStr::from_bytes_until_nul(self.0).map_err(|_| Errno::INVAL)?;
        self.bytes(text.to_bytes_with_nul().len())?;
        Ok(text)
    }

    /// Takes a name up to the next NUL.
    pub fn name(&mut self) -> Result<Name<'a>, Errno> {
        Name::new(self.text()?)
    }
}

/// The name of a directory entry. It is never a path, `.` or `..`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Name<'a>(&'a CStr);

impl<'a> Name<'a> {
    const MAX_LEN: usize = 255;

    /// Checks a name.
    pub fn new(text: &'a CStr) -> Result<Self, Errno> {
        match text.to_bytes() {
            b"" | b"." | b".." => Err(Errno::INVAL),
            bytes if bytes.contains(&b'/') => Err(Errno::INVAL),
            bytes if bytes.len() > Self::MAX_LEN => Err(Errno::NAMETOOLONG),
            _ => Ok(Self(text)),
        }
    }

    /// Returns the name as a path of one component, for system calls.
    pub fn as_c_str(self) -> &'a CStr {
        self.0
    }
}

/// The reply to a request. Its buffer is reused for the next reply.
#[derive(Debug)]
pub struct Reply {
    buffer: Box<[u8]>,
    len: usize,
    max_len: usize,
}

impl Reply {
    pub fn new() -> Self {
        Self { buffer: vec![0; HEADER + MAX_TRANSFER].into(), len: HEADER, max_len: HEADER }
    }

    /// Begins a reply of at most `max_len` bytes, including the header.
    pub fn begin(&mut self, max_len: usize) {
        self.len = HEADER;
        self.max_len = max_len.min(self.buffer.len());
    }

    /// Limits the rest of the reply to `count` bytes. Never raises the limit.
    pub fn limit(&mut self, count: usize) {
        self.max_len = self.max_len.min(self.len.saturating_add(count));
    }

    /// Returns the number of bytes that may still be added.
    pub fn remaining(&self) -> usize {
        self.max_len.saturating_sub(self.len)
    }

    /// Fails if not even `len` bytes may be added. Must be called before something is created that the reply returns.
    pub fn require(&self, len: usize) -> Result<(), Errno> {
        if len <= self.remaining() { Ok(()) } else { Err(Errno::INVAL) }
    }

    /// Adds bytes.
    pub fn put(&mut self, bytes: &[u8]) -> Result<(), Errno> {
        self.fill(bytes.len(), |free| {
            // The buffer is shorter than requested if the guest's reply buffer is too small.
            let free = free.get_mut(..bytes.len()).ok_or(Errno::INVAL)?;
            free.copy_from_slice(bytes);
            Ok(bytes.len())
        })
    }

    /// Lets `read` fill a buffer of at most `count` bytes. `read` returns the number of bytes that it has filled.
    pub fn fill(
        &mut self,
        count: usize,
        read: impl FnOnce(&mut [u8]) -> Result<usize, Errno>,
    ) -> Result<(), Errno> {
        let count = count.min(self.remaining());
        let free = &mut self.buffer[self.len..];
        self.len += read(&mut free[..count])?;
        Ok(())
    }

    /// Returns what was added.
    pub fn body(&self) -> &[u8] {
        &self.buffer[HEADER..self.len]
    }

    /// Returns the complete reply, or nothing if not even the header fits.
    pub fn finish(&mut self, unique: u64, result: Result<(), Errno>) -> &[u8] {
        if self.max_len < HEADER {
            return &[];
        }
        let error = match result {
            Ok(()) => 0,
            Err(errno) => {
                self.len = HEADER;
                -errno.raw_os_error()
            }
        };
        let len = u32::try_from(self.len).expect("the buffer is shorter than 4 GiB");
        self.buffer[..HEADER].copy_from_slice(OutHeader { len, error, unique }.as_slice());
        &self.buffer[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_never_a_path_or_the_parent_directory() {
        for bad in [c"", c".", c"..", c"/", c"a/b", c"../x", c"/etc/passwd", c"a/"] {
            assert_eq!(Name::new(bad), Err(Errno::INVAL), "{bad:?}");
        }
        for good in [c"a", c"...", c"..a", c" ", c"\\", c"\xff\xfe"] {
            assert!(Name::new(good).is_ok(), "{good:?}");
        }
    }

    #[test]
    fn a_name_without_a_terminating_nul_is_refused() {
        assert_eq!(Body(b"name").name(), Err(Errno::INVAL));
        assert_eq!(Body(b"").name(), Err(Errno::INVAL));
    }

    #[test]
    fn a_name_has_at_most_255_bytes() {
        let mut body = vec![b'x'; 256];
        body[255] = 0;
        assert!(Body(&body).name().is_ok());
        body[255] = b'x';
        body.push(0);
        assert_eq!(Body(&body).name(), Err(Errno::NAMETOOLONG));
    }

    #[test]
    fn a_reply_never_exceeds_its_limit() {
        let mut reply = Reply::new();
        reply.begin(20);
        assert_eq!(reply.put(&[1; 5]), Err(Errno::INVAL));
        assert_eq!(reply.put(&[1; 4]), Ok(()));
        assert_eq!(reply.finish(7, Ok(())).len(), 20);
        reply.begin(15);
        assert_eq!(reply.finish(7, Ok(())), b"");
    }
}
