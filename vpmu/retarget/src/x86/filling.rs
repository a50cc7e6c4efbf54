//! Finds unused space in a kernel's text for code of the VMM's.

use std::ops::Range;

use super::image::Image;
use super::starts::known;

/// The byte that fills the kernel's text between functions (INT3).
pub(crate) const FILLING: u8 = 0xcc;

/// Finds unused space for `len` bytes of code, `within` these addresses: in the filling of the kernel's text, with at
/// least 256 bytes of filling on both sides. Returns `None` if there is none, or if no table of the kernel tells where
/// its functions are.
pub fn room(image: &Image, len: usize, within: &Range<u64>) -> Option<u64> {
    const CHUNK: usize = 256;
    let needed = len.div_ceil(CHUNK) + 2;
    // A function may begin in what looks like filling.
    let known: Vec<u64> = known(image).collect();
    let text = image.code().find(|section| section.name == ".text")?;
    let mut filled = 0;
    let chunks = (text.address..).step_by(CHUNK).zip(text.bytes.chunks_exact(CHUNK));
    let is_within = |address: u64| within.contains(&address);
    for (address, chunk) in chunks.filter(|(address, _)| is_within(*address)) {
        filled = if chunk.iter().all(|byte| *byte == FILLING) { filled + 1 } else { 0 };
        if filled == needed {
            let end = address + CHUNK as u64;
            let begin = end - (needed * CHUNK) as u64;
            let all = begin..end;
            if !known.is_empty() && end <= within.end && !known.iter().any(|address| all.contains(address)) {
                return Some(begin + CHUNK as u64);
            }
            filled = 0;
        }
    }
    None
}
