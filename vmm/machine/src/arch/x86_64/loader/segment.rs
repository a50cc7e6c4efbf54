//! The segments of an image, and how they are copied into the guest's memory.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use vm_memory::{Bytes, GuestAddress};

use crate::arch::x86_64::memory::{self, RangeKind};
use crate::loader::error::Problem;
use crate::memory::GuestRam;

/// Lowest address for an image. Tally's segment descriptors are below.
const LOWEST: u64 = 0x1000;
const PAGE: u64 = 4096;

/// A segment of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Segment {
    /// Physical addresses of the segment, including the zeroes at its end.
    pub memory: Range<u64>,
    /// Range of the segment's bytes in the image. Not longer than `memory`.
    pub file: Range<usize>,
    /// Virtual address at which the kernel maps the segment.
    pub virtual_address: u64,
}

/// Returns the end of the segment with the highest physical addresses.
pub fn end(segments: &[Segment]) -> u64 {
    segments.iter().map(|s| s.memory.end).max().unwrap_or(0)
}

/// Returns true if a physical address is in one of the segments.
pub fn contain(segments: &[Segment], address: u64) -> bool {
    segments.iter().any(|s| s.memory.contains(&address))
}

/// Copies an image's segments into the guest's memory.
///
/// Zeroes at a segment's end are not written, even if the file contains them, as Linux' file contains its `.bss`. The
/// guest's memory is initially zero, and the host allocates no memory for pages that are never written.
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

/// Returns the bytes without the zeroes at the end, apart from less than a page of them.
fn without_zeroes(bytes: &[u8]) -> &[u8] {
    const CHUNK: usize = 4096;
    // The compiler vectorises a fold without an early exit.
    let is_zero = |chunk: &&[u8]| chunk.iter().fold(0, |all, byte| all | byte) == 0;
    let zeroes: usize = bytes.rchunks(CHUNK).take_while(is_zero).map(<[u8]>::len).sum();
    &bytes[..bytes.len() - zeroes]
}

/// Returns an error that names `what` if `end` is beyond the guest's memory below the hole.
pub fn check_end(what: &'static str, end: u64, ram: &GuestRam) -> Result<(), Problem> {
    if end > memory::low_end(ram.size()) { Err(too_small(what, end, ram)) } else { Ok(()) }
}

/// Returns the error for something that ends beyond the guest's memory, or beyond the start of the hole.
pub fn too_small(what: &'static str, end: u64, ram: &GuestRam) -> Problem {
    if ram.size() > memory::low_end(ram.size()) {
        Problem::Hole { what, end, hole: memory::low_end(ram.size()) }
    } else {
        Problem::Memory { what, needs: end, has: memory::low_end(ram.size()) }
    }
}

/// Rounds an address up to a page boundary. Returns `u64::MAX` if that overflows.
pub fn page_up(address: u64) -> u64 {
    address.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX)
}

/// Rounds an address down to a page boundary.
pub fn page_down(address: u64) -> u64 {
    address - address % PAGE
}
