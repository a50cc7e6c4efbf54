//! Compresses in lz4's format, thoroughly: an image is packed once and unpacked at every boot.
//!
//! The kernel unpacks lz4 with a few instructions a byte, which counts where every instruction is simulated. The usual
//! encoders search little; this one looks at several earlier places for each match (the block format is described in
//! `doc/lz4_Block_format.md` of lz4).

/// What a frame of the kind that the kernel reads begins with; see "Legacy frame" in `doc/lz4_Frame_format.md`.
const LEGACY_MAGIC: u32 = 0x184c_2102;
/// The most content that a block of such a frame has.
const BLOCK: usize = 8 << 20;

const MIN_MATCH: usize = 4;
/// The format wants this many bytes at the end outside of matches ...
const LAST_LITERALS: usize = 5;
/// ... and no match to begin later than this.
const LAST_MATCH: usize = 12;
const WINDOW: usize = 1 << 16;
const HASH_BITS: u32 = 16;
/// How many earlier places are looked at.
const DEPTH: usize = 16;
const NOWHERE: u32 = u32::MAX;

/// Compresses `content` into a legacy frame.
pub fn compress(content: &[u8]) -> Vec<u8> {
    let mut packed = LEGACY_MAGIC.to_le_bytes().to_vec();
    for block in content.chunks(BLOCK) {
        let compressed = compress_block(block);
        let length = u32::try_from(compressed.len()).expect("a block is smaller than 4 GiB");
        packed.extend_from_slice(&length.to_le_bytes());
        packed.extend_from_slice(&compressed);
    }
    packed
}

fn compress_block(content: &[u8]) -> Vec<u8> {
    let mut output = Vec::with_capacity(content.len() / 2);
    let mut places = Places::new();
    let (mut at, mut literals) = (0, 0);
    while at + LAST_MATCH < content.len() {
        let found = places.longest_match(content, at);
        places.add(content, at);
        let Some(mut found) = found else {
            at += 1;
            continue;
        };
        // A longer match one byte later is worth a literal.
        while at + 1 + LAST_MATCH < content.len() {
            match places.longest_match(content, at + 1) {
                Some(later) if later.length > found.length => {
                    at += 1;
                    places.add(content, at);
                    found = later;
                }
                _ => break,
            }
        }
        sequence(&mut output, &content[literals..at], Some(found));
        for covered in at + 1..(at + found.length).min(content.len() - LAST_MATCH) {
            places.add(content, covered);
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

/// Where four bytes have been seen: the last place for each hash, and for each place the one before.
struct Places {
    last: Vec<u32>,
    before: Vec<u32>,
}

impl Places {
    fn new() -> Self {
        Self { last: vec![NOWHERE; 1 << HASH_BITS], before: vec![NOWHERE; WINDOW] }
    }

    fn hash(content: &[u8], at: usize) -> usize {
        let bytes: [u8; MIN_MATCH] =
            content[at..at + MIN_MATCH].try_into().expect("the slice has this length");
        (u32::from_le_bytes(bytes).wrapping_mul(2_654_435_761) >> (32 - HASH_BITS)) as usize
    }

    fn add(&mut self, content: &[u8], at: usize) {
        let last = &mut self.last[Self::hash(content, at)];
        self.before[at % WINDOW] = *last;
        *last = u32::try_from(at).expect("a block is smaller than 4 GiB");
    }

    fn longest_match(&self, content: &[u8], at: usize) -> Option<Match> {
        let end = content.len() - LAST_LITERALS;
        let mut best = Match { distance: 0, length: MIN_MATCH - 1 };
        let mut candidate = self.last[Self::hash(content, at)];
        for _ in 0..DEPTH {
            let place = candidate as usize;
            if candidate == NOWHERE || at - place >= WINDOW {
                break;
            }
            // Most candidates are no better than what is known, which one byte shows.
            if at + best.length < end && content[place + best.length] == content[at + best.length] {
                let length = content[place..]
                    .iter()
                    .zip(&content[at..end])
                    .take_while(|(before, now)| before == now)
                    .count();
                if length > best.length {
                    best = Match { distance: at - place, length };
                }
            }
            let earlier = self.before[place % WINDOW];
            // The slot may have been taken by a later place.
            if earlier == NOWHERE || earlier >= candidate {
                break;
            }
            candidate = earlier;
        }
        (best.length >= MIN_MATCH).then_some(best)
    }
}

/// Literals and the match that follows them; only the last sequence of a block has none.
fn sequence(output: &mut Vec<u8>, literals: &[u8], found: Option<Match>) {
    let extra = found.map_or(0, |found| found.length - MIN_MATCH);
    let nibble = |length: usize| u8::try_from(length.min(15)).expect("it fits in four bits");
    output.push(nibble(literals.len()) << 4 | nibble(extra));
    more_length(output, literals.len());
    output.extend_from_slice(literals);
    if let Some(found) = found {
        let distance = u16::try_from(found.distance).expect("matches are in the window");
        output.extend_from_slice(&distance.to_le_bytes());
        more_length(output, extra);
    }
}

fn more_length(output: &mut Vec<u8>, length: usize) {
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

    /// Gives the packed length.
    fn survives(content: &[u8]) -> usize {
        let packed = compress_block(content);
        let unpacked = lz4_flex::block::decompress(&packed, content.len()).unwrap();
        assert!(unpacked == content, "{} bytes changed", content.len());
        packed.len()
    }

    /// Numbers that look random and are the same every time.
    fn noise(length: usize) -> Vec<u8> {
        let mut state = 1_u32;
        let next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state.to_be_bytes()[0]
        };
        std::iter::repeat_with(next).take(length).collect()
    }

    #[test]
    fn what_was_packed_comes_back() {
        for length in [0, 1, 4, 12, 13, 14, 17, 100, 300, 5000] {
            survives(&vec![7; length]);
            survives(&noise(length));
        }
        let text: Vec<u8> =
            (0..20_000).flat_map(|i: u32| format!("line {} of {}\n", i, i % 77).into_bytes()).collect();
        assert!(survives(&text) < text.len() / 2);
        let mut far = noise(WINDOW + 100);
        far.extend_from_within(..);
        survives(&far);
    }

    #[test]
    fn literals_and_matches_of_every_length_fit_their_counts() {
        for length in [14, 15, 16, 269, 270, 271, 600] {
            let mut content = noise(length);
            content.extend(vec![0; length]);
            content.extend(noise(20));
            survives(&content);
        }
    }

    #[test]
    fn a_frame_is_cut_into_blocks() {
        let content: Vec<u8> = (0..9_000_000_u32).map(|i| (i / 1000).to_le_bytes()[0]).collect();
        let packed = compress(&content);
        assert_eq!(packed[..4], [0x02, 0x21, 0x4c, 0x18]);
        let first = u32::from_le_bytes(packed[4..8].try_into().unwrap()) as usize;
        let second = &packed[8 + first..];
        let length = u32::from_le_bytes(second[..4].try_into().unwrap()) as usize;
        assert_eq!(second.len(), 4 + length);
        let unpacked = lz4_flex::block::decompress(&second[4..], BLOCK).unwrap();
        assert!(unpacked == content[BLOCK..]);
    }
}
