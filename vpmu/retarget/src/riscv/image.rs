//! A kernel's `Image`: which of its bytes are executable, and access to them by 16-bit parcels and 32-bit words.

use std::ops::Range;

/// Length of the header.
pub const HEADER: usize = 64;
/// Offset and value of the header's magic number (Documentation/arch/riscv/boot-image-header.rst).
pub const MAGIC: (usize, &[u8]) = (0x38, b"RSC\x05");

/// Offset of the header's field that holds the offset of the PE header, which a kernel with an EFI stub has.
const PE_OFFSET: usize = 0x3c;
const PE_MAGIC: &[u8] = b"PE\0\0";
/// `IMAGE_SCN_MEM_EXECUTE`: the section is executable.
const PE_EXECUTABLE: u32 = 0x2000_0000;
const PE_SECTION_LEN: usize = 40;

/// The executable part of an image.
#[derive(Debug, Clone, Copy)]
pub struct Text<'a> {
    image: &'a [u8],
    start: usize,
    end: usize,
}

impl<'a> Text<'a> {
    /// Returns the text of an image. Returns `None` if the image is no RISC-V kernel.
    ///
    /// Only the PE header says where the text is. Without one, the whole image is taken for text.
    pub fn of(image: &'a [u8]) -> Option<Self> {
        let (at, magic) = MAGIC;
        if image.get(at..)?.get(..magic.len())? != magic {
            return None;
        }
        let range = executable(image).unwrap_or(HEADER..image.len());
        let start = range.start.max(HEADER).next_multiple_of(2);
        Some(Self { image, start, end: range.end.min(image.len()) })
    }

    /// Returns the offset of the text in the image, which is even.
    pub fn start(&self) -> usize {
        self.start
    }

    /// Returns the offset of the end of the text.
    pub fn end(&self) -> usize {
        self.end
    }

    /// Returns all offsets at which an instruction can begin, from an offset on.
    pub fn places(&self, from: usize) -> impl DoubleEndedIterator<Item = usize> + use<> {
        (from.max(self.start)..self.end.saturating_sub(1)).step_by(2)
    }

    /// Returns the 16 bits at an offset, if they are text.
    pub fn parcel(&self, at: usize) -> Option<u16> {
        let bytes = self.slice(at, 2)?;
        Some(u16::from_le_bytes([bytes[0], bytes[1]]))
    }

    /// Returns the 32 bits at an offset, if they are text.
    pub fn word(&self, at: usize) -> Option<u32> {
        u32_at(self.slice(at, 4)?, 0)
    }

    /// Returns all even offsets with the 32 bits there.
    pub fn words(&self) -> impl Iterator<Item = (usize, u32)> + use<'a> {
        let bytes = self.image.get(self.start..self.end).unwrap_or_default();
        let parcels = bytes.chunks_exact(2).map(|bytes| u32::from(u16::from_le_bytes([bytes[0], bytes[1]])));
        let pairs = parcels.clone().zip(parcels.skip(1));
        (self.start..).step_by(2).zip(pairs.map(|(low, high)| low | high << 16))
    }

    fn slice(&self, at: usize, len: usize) -> Option<&'a [u8]> {
        let end = at.checked_add(len)?;
        (at >= self.start && end <= self.end).then(|| &self.image[at..end])
    }
}

/// Returns the number of bytes of memory that a kernel needs from the beginning of its image on.
pub fn memory(image: &[u8]) -> u64 {
    const SIZE: usize = 16;
    let size = image.get(SIZE..SIZE + 8).and_then(|bytes| Some(u64::from_le_bytes(bytes.try_into().ok()?)));
    size.unwrap_or_default().max(image.len() as u64)
}

/// Returns the range from the first to the last executable section of the PE header, if there is one.
fn executable(image: &[u8]) -> Option<Range<usize>> {
    let header = image.get(usize_at(image, PE_OFFSET)?..)?;
    if !header.starts_with(PE_MAGIC) {
        return None;
    }
    let count = u16_at(header, 6)?;
    let table = header.get(24 + usize::from(u16_at(header, 20)?)..)?;
    let sections = table.chunks_exact(PE_SECTION_LEN).take(count.into());
    let executable = sections.filter_map(|section| {
        let start = usize_at(section, 20)?;
        let end = start.checked_add(usize_at(section, 16)?)?;
        (u32_at(section, 36)? & PE_EXECUTABLE != 0 && start < end && end <= image.len()).then_some(start..end)
    });
    executable.reduce(|all, one| all.start.min(one.start)..all.end.max(one.end))
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at.checked_add(2)?)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

fn usize_at(bytes: &[u8], at: usize) -> Option<usize> {
    usize::try_from(u32_at(bytes, at)?).ok()
}
