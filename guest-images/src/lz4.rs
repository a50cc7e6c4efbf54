//! An LZ4 encoder with a high compression ratio, because an image is compressed once and decompressed at every boot.
//!
//! The kernel needs only a few instructions per byte to decompress LZ4, which matters in the lab, where every
//! instruction is simulated. This encoder checks several candidates for each match, more than fast encoders do.
//! `doc/lz4_Block_format.md` of lz4 describes the block format.

/// Magic number of the frame format that the kernel reads; see "Legacy frame" in `doc/lz4_Frame_format.md`.
const LEGACY_MAGIC: u32 = 0x184c_2102;
/// Maximum uncompressed size of a block in such a frame.
const BLOCK: usize = 8 << 20;

const MIN_MATCH: usize = 4;
/// Number of bytes at the end of a block that must be literals.
const LAST_LITERALS: usize = 5;
/// Minimum distance of a match's start from the end of the block.
const LAST_MATCH: usize = 12;
const WINDOW: usize = 1 << 16;
const HASH_BITS: u32 = 16;
/// Maximum number of candidates that are checked for a match.
const DEPTH: usize = 16;
/// Marks an empty slot of [`Positions`].
const NONE: u32 = u32::MAX;

/// Compresses `content` into a legacy frame.
pub fn compress(content: &[u8]) -> Vec<u8> {
    let mut frame = LEGACY_MAGIC.to_le_bytes().to_vec();
    for block in content.chunks(BLOCK) {
        let compressed = compress_block(block);
        let length = u32::try_from(compressed.len()).expect("a block is smaller than 4 GiB");
        frame.extend_from_slice(&length.to_le_bytes());
        frame.extend_from_slice(&compressed);
    }
    frame
}

fn compress_block(content: &[u8]) -> Vec<u8> {
    let mut output = Vec::with_capacity(content.len() / 2);
    let mut positions = Positions::new();
    let (mut at, mut literals) = (0, 0);
    while at + LAST_MATCH < content.len() {
        let found = positions.longest_match(content, at);
        positions.add(content, at);
        let Some(mut found) = found else {
            at += 1;
            continue;
        };
        // Lazy matching: a longer match at the next byte is worth an additional literal.
        while at + 1 + LAST_MATCH < content.len() {
            match positions.longest_match(content, at + 1) {
                Some(later) if later.length > found.length => {
                    at += 1;
                    positions.add(content, at);
                    found = later;
                }
                _ => break,
            }
        }
        sequence(&mut output, &content[literals..at], Some(found));
        for covered in at + 1..(at + found.length).min(content.len() - LAST_MATCH) {
            positions.add(content, covered);
        }
        at += found.length;
        literals = at;
    }
    sequence(&mut output, &content[literals..], None);
    output
}

#[derive(Clone, Copy)]
struct Match {
    distance: usize,
    length: usize,
}

/// Hash chains: for each hash of four bytes the last position, and for each position the previous one with the same
/// hash.
struct Positions {
    last: Vec<u32>,
    previous: Vec<u32>,
}

impl Positions {
    fn new() -> Self {
        Self { last: vec![NONE; 1 << HASH_BITS], previous: vec![NONE; WINDOW] }
    }

    fn hash(content: &[u8], at: usize) -> usize {
        let bytes: [u8; MIN_MATCH] =
            content[at..at + MIN_MATCH].try_into().expect("the slice has this length");
        (u32::from_le_bytes(bytes).wrapping_mul(2_654_435_761) >> (32 - HASH_BITS)) as usize
    }

    fn add(&mut self, content: &[u8], at: usize) {
        let last = &mut self.last[Self::hash(content, at)];
        self.previous[at % WINDOW] = *last;
        *last = u32::try_from(at).expect("a block is smaller than 4 GiB");
    }

    fn longest_match(&self, content: &[u8], at: usize) -> Option<Match> {
        let end = content.len() - LAST_LITERALS;
        let mut best = Match { distance: 0, length: MIN_MATCH - 1 };
        let mut candidate = self.last[Self::hash(content, at)];
        for _ in 0..DEPTH {
            let position = candidate as usize;
            if candidate == NONE || at - position >= WINDOW {
                break;
            }
            // A candidate can only be longer than the best match if the byte after the best match's length agrees, too.
            if at + best.length < end && content[position + best.length] == content[at + best.length] {
                let length = content[position..]
                    .iter()
                    .zip(&content[at..end])
                    .take_while(|(before, now)| before == now)
                    .count();
                if length > best.length {
                    best = Match { distance: at - position, length };
                }
            }
            let earlier = self.previous[position % WINDOW];
            // The slot may have been overwritten by a later position.
            if earlier == NONE || earlier >= candidate {
                break;
            }
            candidate = earlier;
        }
        (best.length >= MIN_MATCH).then_some(best)
    }
}

/// Writes a sequence: literals and the match that follows them. The last sequence of a block has no match.
fn sequence(output: &mut Vec<u8>, literals: &[u8], found: Option<Match>) {
    let extra = found.map_or(0, |found| found.length - MIN_MATCH);
    let nibble = |length: usize| u8::try_from(length.min(15)).expect("it fits in four bits");
    output.push(nibble(literals.len()) << 4 | nibble(extra));
    extended_length(output, literals.len());
    output.extend_from_slice(literals);
    if let Some(found) = found {
        let distance = u16::try_from(found.distance).expect("matches are in the window");
        output.extend_from_slice(&distance.to_le_bytes());
        extended_length(output, extra);
    }
}

fn extended_length(output: &mut Vec<u8>, length: usize) {
    let Some(mut rest) = length.checked_sub(15) else { return };
    while rest >= 255 {
        output.push(255);
        rest -= 255;
    }
    output.push(u8::try_from(rest).expect("the loop left less than 255"));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that a block is decompressed to the original. Returns the compressed size.
    fn check_round_trip(content: &[u8]) -> usize {
        let compressed = compress_block(content);
        let decompressed = lz4_flex::block::decompress(&compressed, content.len()).unwrap();
        assert!(decompressed == content, "{} bytes changed", content.len());
        compressed.len()
    }

    /// Returns pseudorandom bytes, which are always the same.
    fn noise(length: usize) -> Vec<u8> {
        let mut state = 1_u32;
        let next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state.to_be_bytes()[0]
        };
        std::iter::repeat_with(next).take(length).collect()
    }

    #[test]
    fn blocks_are_decompressed_to_the_original() {
        for length in [0, 1, 4, 12, 13, 14, 17, 100, 300, 5000] {
            check_round_trip(&vec![7; length]);
            check_round_trip(&noise(length));
        }
        let text: Vec<u8> =
            (0..20_000).flat_map(|i: u32| format!("line {} of {}\n", i, i % 77).into_bytes()).collect();
        assert!(check_round_trip(&text) < text.len() / 2);
        let mut far = noise(WINDOW + 100);
        far.extend_from_within(..);
        check_round_trip(&far);
    }

    #[test]
    fn literals_and_matches_at_the_limits_of_the_length_encoding_work() {
        for length in [14, 15, 16, 269, 270, 271, 600] {
            let mut content = noise(length);
            content.extend(vec![0; length]);
            content.extend(noise(20));
            check_round_trip(&content);
        }
    }

    #[test]
    fn a_frame_is_divided_into_blocks() {
        let content: Vec<u8> = (0..9_000_000_u32).map(|i| (i / 1000).to_le_bytes()[0]).collect();
        let compressed = compress(&content);
        assert_eq!(compressed[..4], [0x02, 0x21, 0x4c, 0x18]);
        let first = u32::from_le_bytes(compressed[4..8].try_into().unwrap()) as usize;
        let second = &compressed[8 + first..];
        let length = u32::from_le_bytes(second[..4].try_into().unwrap()) as usize;
        assert_eq!(second.len(), 4 + length);
        let decompressed = lz4_flex::block::decompress(&second[4..], BLOCK).unwrap();
        assert!(decompressed == content[BLOCK..]);
    }
}
