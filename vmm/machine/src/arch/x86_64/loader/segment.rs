//! The parts of an image, and where in the guest's memory they belong.

use std::ops::Range;

use vm_memory::{Bytes, GuestAddress};

use crate::arch::x86_64::memory::{self, RangeKind};
use crate::loader::error::Problem;
use crate::memory::GuestRam;

/// Memory below this is not for images: Tally's segment descriptors are there.
const LOWEST: u64 = 0x1000;
const PAGE: u64 = 4096;

/// One part of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Its physical addresses, its zeroes at the end included.
    pub memory: Range<u64>,
    /// Its bytes in the image; no more than there is memory for.
    pub file: Range<usize>,
    /// The virtual address at which the kernel will map it.
    pub virtual_address: u64,
}

/// One past the last address of any segment.
pub fn end(segments: &[Segment]) -> u64 {
    segments.iter().map(|s| s.memory.end).max().unwrap_or(0)
}

/// Whether an address is in one of them.
pub fn contain(segments: &[Segment], address: u64) -> bool {
    segments.iter().any(|s| s.memory.contains(&address))
}

/// Copies an image's segments into the guest's memory.
///
/// Zeroes at a segment's end are not written, whether the file has them or not (Linux' `.bss` is in its file): the
/// guest's memory is zero to begin with, and pages that nobody wrote cost the host nothing.
pub fn place(segments: &[Segment], image: &[u8], ram: &GuestRam) -> Result<(), Problem> {
    let map = memory::map(ram.size());
    for Segment { memory, file, .. } in segments {
        let free = |range: &memory::Range| {
            range.kind == RangeKind::Ram
                && range.start.max(LOWEST) <= memory.start
                && memory.end <= range.start + range.len
        };
        check_end("the kernel", memory.end, ram)?;
        if !map.iter().any(free) {
            return Err(Problem::Reserved { start: memory.start, end: memory.end });
        }
        let bytes = image.get(file.clone()).ok_or(Problem::Damaged("a segment is not in the file"))?;
        ram.mapped
            .write_slice(without_zeroes(bytes), GuestAddress(memory.start))
            .map_err(|_| Problem::Reserved { start: memory.start, end: memory.end })?;
    }
    Ok(())
}

/// The bytes without the zeroes at their end, but for less than a page.
fn without_zeroes(bytes: &[u8]) -> &[u8] {
    const CHUNK: usize = 4096;
    // To look at all bytes of a chunk at once is quick.
    let is_zero = |chunk: &&[u8]| chunk.iter().fold(0, |all, byte| all | byte) == 0;
    let zeroes: usize = bytes.rchunks(CHUNK).take_while(is_zero).map(<[u8]>::len).sum();
    &bytes[..bytes.len() - zeroes]
}

/// Whether the guest has memory up to that address, below its hole.
pub fn check_end(what: &'static str, end: u64, ram: &GuestRam) -> Result<(), Problem> {
    if end > memory::low_end(ram.size()) { Err(too_small(what, end, ram)) } else { Ok(()) }
}

/// What to say of something that would end beyond the guest's memory, or beyond where its hole begins.
pub fn too_small(what: &'static str, end: u64, ram: &GuestRam) -> Problem {
    if ram.size() > memory::low_end(ram.size()) {
        Problem::Hole { what, end, hole: memory::low_end(ram.size()) }
    } else {
        Problem::Memory { what, needs: end, has: memory::low_end(ram.size()) }
    }
}

/// The next page boundary; absurd addresses stay absurd.
pub fn page_up(address: u64) -> u64 {
    address.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX)
}

/// The page boundary at or below an address.
pub fn page_down(address: u64) -> u64 {
    address - address % PAGE
}
