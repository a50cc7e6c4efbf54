//! Searches a kernel's data for tables of addresses.

use super::image::Section;

/// Size of a word.
pub const WORD: u64 = 8;

/// The aligned words of a section.
pub struct Words<'a> {
    /// Address of the first one.
    pub address: u64,
    /// The words, as bytes in memory.
    pub words: &'a [[u8; 8]],
}

impl<'a> Words<'a> {
    /// Returns the words of a section.
    pub fn of(section: &'a Section) -> Self {
        let address = section.address.next_multiple_of(WORD);
        let (words, _) = section.from(address).as_chunks();
        Self { address, words }
    }

    /// Returns the word at a position, or `None` beyond the last one.
    pub fn get(&self, position: usize) -> Option<u64> {
        self.words.get(position).map(|word| u64::from_le_bytes(*word))
    }
}

/// Returns the positions of the words that fulfil a condition. There are millions of words and few that do, so whole
/// chunks are tested at once, which the compiler vectorizes.
pub fn positions<'a>(
    words: &'a [[u8; 8]],
    condition: impl Fn(&[u8; 8]) -> bool + Copy + 'a,
) -> impl Iterator<Item = usize> + 'a {
    const CHUNK: usize = 64;
    let has_one =
        move |words: &[[u8; 8]]| words.iter().fold(0, |any, word| any | u8::from(condition(word))) != 0;
    let chunks = words.chunks(CHUNK).zip((0..).step_by(CHUNK)).filter(move |(chunk, _)| has_one(chunk));
    chunks.flat_map(move |(chunk, begin)| {
        (begin..).zip(chunk).filter(move |(_, word)| condition(word)).map(|(position, _)| position)
    })
}
