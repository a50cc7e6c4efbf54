//! The buffers of a request, in the guest's memory.
//!
//! Reading and writing fails once the driver has reset the device.

use std::collections::VecDeque;
use std::io::{self, Read, Write};

use vm_memory::VolatileSlice;

use super::mmio::Session;

mod straight;

pub use straight::Moved;

/// Maximum number of bytes that are copied at a time, while the registers are locked: some ten microseconds.
const PIECE: usize = 128 << 10;

/// A sequence of buffers that is read or written from its begin to its end.
pub struct Buffers<'a> {
    session: Session<'a>,
    /// None is empty.
    slices: VecDeque<VolatileSlice<'a>>,
    /// Number of bytes in `slices`.
    available: usize,
}

/// The device-readable buffers of a request.
pub struct Reader<'a>(pub(super) Buffers<'a>);

/// The device-writable buffers of a request.
pub struct Writer<'a>(pub(super) Buffers<'a>);

impl<'a> Buffers<'a> {
    pub(super) fn new(session: Session<'a>) -> Self {
        Self { session, slices: VecDeque::new(), available: 0 }
    }

    pub(super) fn push(&mut self, slice: VolatileSlice<'a>) {
        if !slice.is_empty() {
            self.available += slice.len();
            self.slices.push_back(slice);
        }
    }

    /// Calls `copy` with the next buffers, up to `count` bytes, and with the number of bytes copied so far. Returns
    /// that number at the end.
    fn consume(&mut self, count: usize, mut copy: impl FnMut(VolatileSlice, usize)) -> io::Result<usize> {
        let count = count.min(PIECE);
        let slices = &mut self.slices;
        let mut done = 0;
        self.session.access(|| {
            while let Some(slice) = slices.pop_front() {
                let now = slice.len().min(count - done);
                let (now, later) = slice.split_at(now).expect("within the slice");
                copy(now, done);
                done += now.len();
                if !later.is_empty() {
                    slices.push_front(later);
                    break;
                }
            }
        })?;
        self.available -= done;
        Ok(done)
    }
}

impl Reader<'_> {
    /// Returns the number of bytes that have not been read yet.
    pub fn available_bytes(&self) -> usize {
        self.0.available
    }
}

impl Read for Reader<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.consume(bytes.len(), |slice, at| {
            slice.copy_to(&mut bytes[at..]);
        })
    }
}

impl Writer<'_> {
    /// Returns the number of bytes that have not been written yet.
    pub fn available_bytes(&self) -> usize {
        self.0.available
    }

    /// Splits off the first `count` bytes, or as many as there are.
    #[must_use]
    pub fn split_first(&mut self, count: usize) -> Self {
        let mut split = Buffers::new(self.0.session);
        while let rest = count - split.available
            && rest > 0
            && let Some(slice) = self.0.slices.pop_front()
        {
            let (first, later) = slice.split_at(slice.len().min(rest)).expect("within the slice");
            self.0.available -= first.len();
            split.push(first);
            if !later.is_empty() {
                self.0.slices.push_front(later);
            }
        }
        Self(split)
    }

    /// Splits off the last byte, if there is one.
    pub fn split_last(&mut self) -> Option<Self> {
        let slice = self.0.slices.pop_back()?;
        let (rest, last) = slice.split_at(slice.len() - 1).expect("within the slice");
        self.0.available -= slice.len();
        self.0.push(rest);
        let mut split = Buffers::new(self.0.session);
        split.push(last);
        Some(Self(split))
    }
}

impl Write for Writer<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.consume(bytes.len(), |slice, at| slice.copy_from(&bytes[at..]))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
