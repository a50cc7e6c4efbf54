//! A kernel's `Image`: which of its bytes can run, and access to them by the units that RISC-V code is made of.

use std::ops::Range;

/// The header's length.
pub const HEADER: usize = 64;
/// Where the header has its magic number, and what that is (Documentation/arch/riscv/boot-image-header.rst).
pub const MAGIC: (usize, &[u8]) = (0x38, b"RSC\x05");

/// Where the header has the offset of the PE header, if the kernel is an EFI program, too.
const PE_OFFSET: usize = 0x3c;
const PE_MAGIC: &[u8] = b"PE\0\0";
/// The section has instructions (`IMAGE_SCN_MEM_EXECUTE`).
const PE_EXECUTABLE: u32 = 0x2000_0000;
const PE_SECTION_LEN: usize = 40;

/// The part of an image that can run.
#[derive(Debug, Clone, Copy)]
pub struct Text<'a> {
    image: &'a [u8],
    start: usize,
    end: usize,
}

impl<'a> Text<'a> {
    /// The text of an image; none if it is no RISC-V kernel.
    ///
    /// Only the header of an EFI program says where the text is. Without, all of the image may be code.
    pub fn of(image: &'a [u8]) -> Option<Self> {
        let (at, magic) = MAGIC;
        if image.get(at..)?.get(..magic.len())? != magic {
            return None;
        }
        let range = executable(image).unwrap_or(HEADER..image.len());
        let start = range.start.max(HEADER).next_multiple_of(2);
        Some(Self { image, start, end: range.end.min(image.len()) })
    }

    /// Where it begins, an even offset in the image.
    pub fn start(&self) -> usize {
        self.start
    }

    /// Every place where an instruction can begin, from one on.
    pub fn places(&self, from: usize) -> impl DoubleEndedIterator<Item = usize> + use<> {
        (from.max(self.start)..self.end.saturating_sub(1)).step_by(2)
    }

    /// The 16 bits at an offset, if they are text.
    pub fn parcel(&self, at: usize) -> Option<u16> {
        let bytes = self.slice(at, 2)?;
        Some(u16::from_le_bytes([bytes[0], bytes[1]]))
    }

    /// The 32 bits at an offset, if they are text.
    pub fn word(&self, at: usize) -> Option<u32> {
        u32_at(self.slice(at, 4)?, 0)
    }

    /// Each place and the 32 bits there, from the beginning.
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

/// The executable sections of the PE header, from the first to the last.
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
