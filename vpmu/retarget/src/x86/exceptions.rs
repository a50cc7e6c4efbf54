//! Finds the handlers of Linux' exceptions on x86, in the tables from which the kernel makes its interrupt descriptor
//! table (`def_idts` and its like, arrays of `struct idt_data`).
//!
//! A record has three words: the vector and the selector of the code segment, the gate's bits, and the handler's
//! address. A record is taken for one only if several of them follow each other, all of whose handlers are code.

use super::image::{Content, Image};
use super::words::{WORD, Words, positions};

/// Vector of the debug exception.
pub const DEBUG: u8 = 1;
/// Vector of the general-protection exception.
pub const GENERAL_PROTECTION: u8 = 13;

/// A handler of an exception.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Handler {
    /// Address of the handler.
    pub address: u64,
    /// Address of the word in the kernel's table that holds the handler's address.
    pub entry: u64,
}

/// Finds the handler of this exception. Returns `None` if there is none, or if records disagree.
pub fn handler(image: &Image, vector: u8) -> Option<u64> {
    let handlers = handlers(image, vector);
    let address = handlers.first()?.address;
    handlers.iter().all(|other| other.address == address).then_some(address)
}

/// Finds the only record of this exception, to change it. Returns `None` if there are several: it is not known which
/// one counts.
pub fn only_record(image: &Image, vector: u8) -> Option<Handler> {
    match handlers(image, vector)[..] {
        [handler] => Some(handler),
        _ => None,
    }
}

/// Returns the handlers in all records of an exception.
fn handlers(image: &Image, vector: u8) -> Vec<Handler> {
    let first = first_word(vector).to_le_bytes();
    let data = image.sections.iter().filter(|section| section.content == Content::Data);
    let in_section = |section| {
        let words = Words::of(section);
        let records: Vec<_> = positions(words.words, |word| *word == first)
            .filter(|position| is_in_table(image, &words, *position))
            .filter_map(|position| {
                let entry = words.address + (position + RECORD - 1) as u64 * WORD;
                Some(Handler { address: record(image, &words, position)?, entry })
            })
            .collect();
        records
    };
    data.flat_map(in_section).collect()
}

/// Number of words of a record.
const RECORD: usize = 3;
/// Minimum number of records that follow each other.
const MIN_RECORDS: usize = 8;

/// Returns whether there are enough records around a position.
fn is_in_table(image: &Image, words: &Words, position: usize) -> bool {
    let is_record = |position: &usize| record(image, words, *position).is_some();
    let before =
        (1..MIN_RECORDS).map_while(|distance| position.checked_sub(distance * RECORD)).take_while(is_record);
    let from =
        (0..MIN_RECORDS).map_while(|distance| position.checked_add(distance * RECORD)).take_while(is_record);
    before.count() + from.count() >= MIN_RECORDS
}

/// Returns the handler in the record at a position, if there is a record.
fn record(image: &Image, words: &Words, position: usize) -> Option<u64> {
    let [first, bits, handler] = [0, 1, 2].map(|word| words.get(position + word));
    let (vector, handler) = (u8::try_from(first? & u64::from(u32::MAX)).ok()?, handler?);
    let is_record = first? == first_word(vector) && is_gate(bits?) && image.code_at(handler).is_some();
    is_record.then_some(handler)
}

/// Returns the first word of a vector's record: the vector, and the selector of the kernel's code (`__KERNEL_CS`).
fn first_word(vector: u8) -> u64 {
    const KERNEL_CODE: u64 = 0x10;
    KERNEL_CODE << 32 | u64::from(vector)
}

/// Returns whether these are the bits of a present interrupt gate with any stack and for any privilege level
/// (`struct idt_bits`, padded).
fn is_gate(bits: u64) -> bool {
    const STACK: u64 = 7;
    const LEVEL: u64 = 3 << 13;
    const PRESENT_INTERRUPT_GATE: u64 = 0x8e00;
    bits & !(STACK | LEVEL) == PRESENT_INTERRUPT_GATE
}

#[cfg(test)]
mod tests {
    use super::super::{Kind, Section};
    use super::*;

    const TEXT: u64 = 0xffff_ffff_8100_0000;
    const DATA: u64 = 0xffff_ffff_8200_0000;
    const VECTORS: [u8; 9] = [0, 5, 6, 7, 9, 10, GENERAL_PROTECTION, 16, DEBUG];

    fn table(vectors: &[u8]) -> Vec<u64> {
        let handler = |vector: u8| TEXT + u64::from(vector) * 32;
        vectors.iter().flat_map(|vector| [first_word(*vector), 0x8e00, handler(*vector)]).collect()
    }

    fn with_image<R>(words: &[u64], act: impl FnOnce(&Image) -> R) -> R {
        let text = [0x90; 1024];
        let data: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let section = |address, bytes, content| Section::new("", address, bytes, content).expect("it fits");
        let sections = vec![section(TEXT, &text, Content::Code), section(DATA, &data, Content::Data)];
        act(&Image { sections, symbols: Vec::new(), kind: Kind::Linux })
    }

    fn find(words: &[u64], vector: u8) -> Option<Handler> {
        with_image(words, |image| only_record(image, vector))
    }

    #[test]
    fn a_handler_and_its_entry_are_found_wherever_the_table_is() {
        for before in 0..4 {
            let mut words = vec![7; before];
            words.extend(table(&VECTORS));
            words.push(9);
            let entry = DATA + (before as u64 + 6 * 3 + 2) * WORD;
            let handler = Some(Handler { address: TEXT + 13 * 32, entry });
            assert_eq!(find(&words, GENERAL_PROTECTION), handler);
            assert_eq!(find(&words, DEBUG).map(|handler| handler.address), Some(TEXT + 32));
            assert_eq!(find(&words, 14), None);
        }
    }

    #[test]
    fn too_few_records_or_ones_that_lead_to_no_code_are_no_table() {
        assert_eq!(find(&table(&VECTORS[..7]), GENERAL_PROTECTION), None);
        for (word, value) in [(3 * 3 + 2, DATA), (3 * 3 + 1, 0x8f00), (4 * 3, 0x18_0000_0000)] {
            let mut words = table(&VECTORS);
            words[word] = value;
            assert_eq!(find(&words, GENERAL_PROTECTION), None, "{word}");
        }
    }

    #[test]
    fn of_two_records_none_is_the_only_one_but_they_may_agree_on_a_handler() {
        let mut words = table(&VECTORS);
        words.extend(table(&[DEBUG]));
        assert_eq!(find(&words, DEBUG), None);
        let agreed = with_image(&words, |image| handler(image, DEBUG));
        assert_eq!(agreed, Some(TEXT + 32));
        *words.last_mut().expect("there are words") += 64;
        assert_eq!(with_image(&words, |image| handler(image, DEBUG)), None);
    }
}
