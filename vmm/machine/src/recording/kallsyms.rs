//! Symbols of a guest's Linux kernel, from the tables that it has of itself in its memory (`kallsyms`). The guest may
//! have written anything there: all lengths are bounded, and what does not fit together is no table.
//!
//! Names are stored as tokens. The table of these is what can be recognised in a memory: the tokens of single
//! characters come in the order of their codes, and behind it is an index that says where each token begins. The other
//! tables lie around it in one of several orders, and are checked against each other (`scripts/kallsyms.c` in Linux):
//! - Addresses, number of the symbols, names, markers, tokens. Since Linux 6.2, and in later releases of older kernels,
//!   there is the order of the names by the alphabet between markers and tokens.
//! - Since Linux 6.4: number of the symbols, names, markers, tokens, addresses. Of late, the tables are aligned to
//!   words of 32 bits, and an address is an offset behind the place where it is written.

use std::fmt::Write;

use memchr::memmem;
use serde::{Deserialize, Serialize};

/// Symbols of a kernel, in the order of their addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Symbols {
    entries: Vec<Symbol>,
    /// All names, one behind the other, each behind the letter of `nm` for its kind.
    names: String,
    /// Where they were found.
    tables: Tables,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Symbol {
    address: u64,
    /// Where its name ends in the names.
    end: usize,
}

/// Sizes of the tables in front of the tokens' and behind them: of a distribution's kernel, and of any.
pub const SIZES: [[usize; 2]; 2] = [[6 << 20, 2 << 20], [32 << 20, 16 << 20]];
/// What every table of tokens has: the digits.
pub const DIGITS: &[u8] = b"0\x001\x002\x003\x004\x005\x006\x007\x008\x009\0";

const TOKENS: usize = 256;
/// Maximum number of symbols, and maximum size of all of their names.
const MAX_SYMBOLS: usize = 1 << 20;
const MAX_NAMES: usize = 64 << 20;
/// Maximum length of a name, as in Linux (`KSYM_NAME_LEN`).
const MAX_NAME: usize = 512;
/// Maximum number of places at which names or markers are looked for that look like them and are none.
const MAX_CANDIDATES: usize = 16;
/// Maximum number of bytes of names that are looked at and made while tables are looked for in one memory: more than
/// twice as many as the largest tables have, so that a guest cannot make the search long with what nearly fits.
const MAX_EFFORT: usize = 256 << 20;
/// Maximum number of names of one function that are looked at.
const MAX_ALIASES: usize = 16;
/// Number of names for each marker.
const PER_MARKER: usize = 256;

/// A function of a kernel or of a module.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Function {
    /// Its first address, and the address behind it.
    pub start: u64,
    pub end: u64,
    /// Its name, with that of the module.
    pub name: String,
}

/// What a search for tables may still cost.
#[derive(Debug)]
pub struct Effort(usize);

impl Default for Effort {
    fn default() -> Self {
        Self(MAX_EFFORT)
    }
}

impl Effort {
    /// Returns `None` if that is too much.
    fn spend(&mut self, bytes: usize) -> Option<()> {
        self.0 = self.0.checked_sub(bytes)?;
        Some(())
    }
}

impl Symbols {
    /// Reads the tables in a part of a memory, where the digits' tokens are at an offset. `address` is the kernel's
    /// address of the part, a multiple of 8.
    pub fn read(bytes: &[u8], digits: usize, address: u64, effort: &mut Effort) -> Option<Self> {
        [8, 4].into_iter().find_map(|alignment| Self::aligned(bytes, digits, address, alignment, effort))
    }

    /// Returns whether the digits at an offset are those of a table of tokens.
    pub fn has_tokens(bytes: &[u8], digits: usize) -> bool {
        [8, 4].into_iter().any(|alignment| Tokens::around(bytes, digits, alignment).is_some())
    }

    fn aligned(
        bytes: &[u8],
        digits: usize,
        address: u64,
        alignment: usize,
        effort: &mut Effort,
    ) -> Option<Self> {
        let tokens = Tokens::around(bytes, digits, alignment)?;
        let names = Markers::before(bytes, tokens.start)
            .into_iter()
            .find_map(|markers| markers.names(bytes, alignment, effort))
            .or_else(|| Markers::before_order(bytes, tokens.start, alignment, effort))?;
        let Names { start, count, .. } = names;
        let behind = align(tokens.end, alignment)?;
        let offsets = Offsets::at(bytes, behind, count, alignment)
            .or_else(|| Offsets::before(bytes, start.checked_sub(16)?, count))
            .or_else(|| Offsets::from_their_places(bytes, behind, count, address))?;
        let tables = Tables { address, names, tokens, offsets };
        let (mut entries, mut all) = (Vec::with_capacity(count), Vec::new());
        let mut at = start;
        for number in 0..count {
            let (name, next) = encoded(bytes, at)?;
            let before = all.len();
            tables.tokens.add_name(name, &mut all)?;
            effort.spend(name.len() + all.len() - before)?;
            if all.len() > MAX_NAMES {
                return None;
            }
            entries.push(Symbol { address: tables.offsets.address(bytes, number)?, end: all.len() });
            at = next;
        }
        Some(Self { entries, names: String::from_utf8(all).ok()?, tables })
    }

    /// Returns where the kernel has them.
    pub fn tables(&self) -> &Tables {
        &self.tables
    }

    /// Returns address, kind and name of each symbol.
    pub fn iter(&self) -> impl Iterator<Item = (u64, char, &str)> {
        let begins = [0].into_iter().chain(self.entries.iter().map(|symbol| symbol.end));
        let of = |(symbol, begin): (&Symbol, usize)| (symbol.address, begin..symbol.end);
        self.entries.iter().zip(begins).map(move |pair| {
            let (address, name) = of(pair);
            let (kind, name) = self.names[name].split_at(1);
            (address, char::from(kind.as_bytes()[0]), name)
        })
    }

    /// Returns the address of the symbol with this name.
    pub fn address(&self, name: &str) -> Option<u64> {
        // Most names are part of few others, if any.
        memmem::find_iter(self.names.as_bytes(), name).find_map(|start| {
            let number = self.entries.partition_point(|symbol| symbol.end <= start);
            let symbol = self.entries.get(number)?;
            let begin = number.checked_sub(1).map_or(0, |before| self.entries[before].end);
            (begin + 1 == start && symbol.end == start + name.len()).then_some(symbol.address)
        })
    }

    /// Returns the text that `/proc/kallsyms` has for these symbols.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for (address, kind, name) in self.iter() {
            let _ = writeln!(text, "{address:016x} {kind} {name}");
        }
        text
    }
}

/// Where a kernel has the tables of its symbols, and what its names are made of. All else is read when it is asked for,
/// so nothing of it is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tables {
    /// The kernel's address of the part of the memory in which the others are.
    pub address: u64,
    names: Names,
    tokens: Tokens,
    offsets: Offsets,
}

impl Tables {
    /// Returns the function at an address, which ends where the next symbol begins. `read` reads bytes at an offset
    /// behind the tables' address. The guest may have written anything there since they were found.
    pub fn function(&self, address: u64, read: &dyn Fn(usize, &mut [u8]) -> Option<()>) -> Option<Function> {
        let number = |at: usize| {
            let mut word = [0; 4];
            read(at, &mut word)?;
            Some(u32::from_le_bytes(word))
        };
        let of = |symbol: usize| {
            let word = number(self.offsets.start.checked_add(4 * symbol)?)?;
            Some(self.offsets.behind.address(symbol, word.cast_signed()))
        };
        let (mut low, mut high) = (0, self.names.count);
        while low < high {
            let middle = low + (high - low) / 2;
            if of(middle)? <= address {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        // What is behind the last symbol is no function.
        let (last, end) = (low.checked_sub(1)?, (low < self.names.count).then(|| of(low))??);
        let start = of(last)?;
        // Data may have the same address.
        let aliases = (0..=last).rev().take(MAX_ALIASES).take_while(|symbol| of(*symbol) == Some(start));
        let is_function = |name: &String| name.starts_with(['t', 'T', 'w', 'W']);
        let mut named = aliases.filter_map(|symbol| self.name(symbol, &number, read));
        let name = named.find(is_function)?.split_off(1);
        (start <= address && address < end).then_some(Function { start, end, name })
    }

    /// Returns the letter of a symbol's kind and its name.
    fn name(
        &self,
        symbol: usize,
        number: &dyn Fn(usize) -> Option<u32>,
        read: &dyn Fn(usize, &mut [u8]) -> Option<()>,
    ) -> Option<String> {
        /// Maximum size of the names of one marker.
        const MAX_SIZE: usize = PER_MARKER * (MAX_NAME + 2);
        let Names { start, count, markers } = self.names;
        let group = symbol / PER_MARKER;
        let marker = |group: usize| usize::try_from(number(markers.checked_add(4 * group)?)?).ok();
        let first = start.checked_add(marker(group)?)?;
        let is_last = (group + 1) * PER_MARKER >= count;
        let behind = if is_last { markers } else { start.checked_add(marker(group + 1)?)? };
        let mut bytes = vec![0; behind.checked_sub(first)?.min(MAX_SIZE)];
        read(first, &mut bytes)?;
        let mut at = 0;
        for _ in 0..symbol % PER_MARKER {
            (_, at) = encoded(&bytes, at)?;
        }
        let mut name = Vec::new();
        self.tokens.add_name(encoded(&bytes, at)?.0, &mut name)?;
        String::from_utf8(name).ok()
    }
}

/// The table of tokens, and its index behind it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Tokens {
    start: usize,
    /// Where the index ends.
    end: usize,
    texts: Vec<Token>,
}

/// A token, with `?` for what no name has.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Token {
    text: Vec<u8>,
    /// The same, if it is not longer: so many bytes are copied faster than just those that there are.
    wide: [u8; WIDTH],
}

const WIDTH: usize = 32;

impl Token {
    fn new(text: &[u8]) -> Self {
        let printable = |byte: &u8| if byte.is_ascii_graphic() { *byte } else { b'?' };
        let text: Vec<u8> = text.iter().map(printable).collect();
        let mut wide = [b'?'; WIDTH];
        let short = text.len().min(WIDTH);
        wide[..short].copy_from_slice(&text[..short]);
        Self { text, wide }
    }

    fn add_to(&self, to: &mut Vec<u8>) {
        let end = to.len() + self.text.len();
        if self.text.len() <= WIDTH {
            to.extend_from_slice(&self.wide);
            to.truncate(end);
        } else {
            to.extend_from_slice(&self.text);
        }
    }
}

impl Tokens {
    /// Finds the table that has the digits' tokens at an offset.
    fn around(bytes: &[u8], digits: usize, alignment: usize) -> Option<Self> {
        /// Tokens in front of that of `0`, and the longest of these.
        const BEFORE_DIGITS: usize = b'0' as usize;
        const LONGEST: usize = 64;
        let lowest = digits.saturating_sub(BEFORE_DIGITS * LONGEST);
        let mut zeroes = 0;
        let mut start = digits;
        while start > lowest && zeroes <= BEFORE_DIGITS {
            start -= 1;
            zeroes += usize::from(*bytes.get(start)? == 0);
            if start.is_multiple_of(alignment) && zeroes == BEFORE_DIGITS {
                let found = Self::at(bytes, start, alignment);
                if found.is_some() {
                    return found;
                }
            }
        }
        None
    }

    fn at(bytes: &[u8], start: usize, alignment: usize) -> Option<Self> {
        let mut texts = Vec::with_capacity(TOKENS);
        let mut at = start;
        for _ in 0..TOKENS {
            let rest = bytes.get(at..)?;
            let len = memchr::memchr(0, &rest[..rest.len().min(MAX_NAME)])?;
            texts.push(&rest[..len]);
            at += len + 1;
        }
        let index = align(at, alignment)?;
        let end = index.checked_add(2 * TOKENS)?;
        let (index, _) = bytes.get(index..end)?.as_chunks::<2>();
        let mut begin = 0;
        for (token, word) in texts.iter().zip(index) {
            if usize::from(u16::from_le_bytes(*word)) != begin {
                return None;
            }
            begin += token.len() + 1;
        }
        Some(Self { start, end, texts: texts.into_iter().map(Token::new).collect() })
    }

    /// Adds the letter of a kind and a name, stored as these tokens. Returns `None` if there is not even a letter.
    fn add_name(&self, name: &[u8], to: &mut Vec<u8>) -> Option<()> {
        let start = to.len();
        for token in name {
            self.texts[usize::from(*token)].add_to(to);
            if to.len() > start + MAX_NAME {
                to.truncate(start + 1 + MAX_NAME);
                break;
            }
        }
        (to.len() > start).then_some(())
    }
}

/// Where every 256th name is, behind the first.
struct Markers {
    start: usize,
    markers: Vec<usize>,
}

impl Markers {
    /// Finds the markers that end at an offset.
    fn before(bytes: &[u8], end: usize) -> Option<Self> {
        let word = |end: usize| word(bytes, end.checked_sub(4)?);
        let mut start = if word(end)? == 0 { end.checked_sub(4)? } else { end };
        let last = start;
        let mut above = u32::MAX;
        while above != 0 {
            let marker = word(start).filter(|marker| *marker < above)?;
            (above, start) = (marker, start - 4);
        }
        Self::at(bytes, start, (last - start) / 4)
    }

    /// Reads so many markers, which ascend from 0.
    fn at(bytes: &[u8], start: usize, count: usize) -> Option<Self> {
        if count > MAX_SYMBOLS / PER_MARKER {
            return None;
        }
        let (words, _) = bytes.get(start..start.checked_add(4 * count)?)?.as_chunks::<4>();
        // Looked at before any is kept, for this is asked at very many places.
        let number = |word: &[u8; 4]| u32::from_le_bytes(*word);
        if words.first().map(number) != Some(0) || !words.is_sorted_by(|one, next| number(one) < number(next))
        {
            return None;
        }
        let markers = words.iter().map(|word| usize::try_from(number(word)).ok());
        Some(Self { start, markers: markers.collect::<Option<_>>()? })
    }

    /// Finds the names in front of the markers that have the order of the names behind them, in front of the tokens:
    /// three bytes for each name.
    fn before_order(bytes: &[u8], tokens: usize, alignment: usize, effort: &mut Effort) -> Option<Names> {
        let lowest = tokens.saturating_sub(3 * MAX_SYMBOLS);
        let mut candidates = 0;
        let ends = (lowest.next_multiple_of(alignment)..tokens).rev();
        for end in ends.filter(|end| end.is_multiple_of(alignment)) {
            let size = tokens - end;
            for count in size.saturating_sub(alignment - 1).div_ceil(3)..=size / 3 {
                let markers = count.div_ceil(PER_MARKER);
                let start = end.checked_sub(align(4 * markers, alignment)?)?;
                // Most places fail here.
                if word(bytes, start) != Some(0) {
                    continue;
                }
                let Some(found) = Self::at(bytes, start, markers) else { continue };
                let names = found.names(bytes, alignment, effort).filter(|names| names.count == count);
                candidates += 1;
                if names.is_some() || candidates == MAX_CANDIDATES {
                    return names;
                }
            }
        }
        None
    }

    /// Finds the names in front of the markers, by their number, which is in front of them.
    fn names(&self, bytes: &[u8], alignment: usize, effort: &mut Effort) -> Option<Names> {
        let last = self.start.checked_sub(*self.markers.last()?)? / alignment * alignment;
        let first = last.saturating_sub(PER_MARKER * (MAX_NAME + 2)).max(alignment);
        let is_number = |start: usize| {
            let count = word(bytes, start - alignment).and_then(|count| usize::try_from(count).ok());
            let count = count.filter(|count| count.div_ceil(PER_MARKER) == self.markers.len())?;
            let is_padded = alignment == 4 || word(bytes, start - 4) == Some(0);
            is_padded.then_some(Names { start, count, markers: self.start })
        };
        let first = align(first, alignment)?;
        let candidates = (first..=last).step_by(alignment).filter_map(is_number).take(MAX_CANDIDATES);
        candidates.into_iter().find(|names| self.fit(bytes, names, effort))
    }

    /// Returns whether the markers are those of these names, which end where the markers begin.
    fn fit(&self, bytes: &[u8], names: &Names, effort: &mut Effort) -> bool {
        let mut at = names.start;
        for number in 0..names.count {
            let marker = self.markers.get(number / PER_MARKER);
            if number % PER_MARKER == 0 && marker != Some(&(at - names.start)) {
                return false;
            }
            let Some((_, next)) = encoded(bytes, at).filter(|(_, next)| *next <= self.start) else {
                return false;
            };
            if effort.spend(next - at).is_none() {
                return false;
            }
            at = next;
        }
        self.start - at < 8
    }
}

/// The names, in tokens, and where their markers are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Names {
    start: usize,
    count: usize,
    markers: usize,
}

/// Returns the tokens of the name at an offset, and where the next one is.
fn encoded(bytes: &[u8], at: usize) -> Option<(&[u8], usize)> {
    let first = usize::from(*bytes.get(at)?);
    let (len, start) = if first & 0x80 == 0 {
        (first, at + 1)
    } else {
        (first & 0x7f | usize::from(*bytes.get(at + 1)?) << 7, at + 2)
    };
    let end = start + len;
    Some((bytes.get(start..end).filter(|name| !name.is_empty())?, end))
}

/// Where the symbols' addresses are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Offsets {
    start: usize,
    behind: Behind,
}

/// What an address is behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Behind {
    /// Behind this one.
    Base(u64),
    /// Kernels whose variables of each CPU have absolute addresses have those as they are, and the others negative.
    BaseIfNegative(u64),
    /// Behind the places where the offsets are, of which this is the first.
    Place(u64),
}

impl Behind {
    /// Returns the address of a symbol.
    fn address(self, symbol: usize, word: i32) -> u64 {
        match (self, word) {
            (Self::BaseIfNegative(_), 0..) => u64::from(word.cast_unsigned()),
            (Self::BaseIfNegative(base), ..0) => base.wrapping_add(u64::from((-1 - word).cast_unsigned())),
            (Self::Base(base), _) => base.wrapping_add(u64::from(word.cast_unsigned())),
            (Self::Place(first), _) => first.wrapping_add(4 * symbol as u64).wrapping_add_signed(word.into()),
        }
    }
}

impl Offsets {
    /// Reads the offsets at a place, and the base behind them.
    fn at(bytes: &[u8], start: usize, count: usize, alignment: usize) -> Option<Self> {
        let base = align(start.checked_add(4 * count)?, alignment)?;
        Self::of(bytes, start, count, base)
    }

    /// Reads the base at a place, and the offsets in front of it.
    fn before(bytes: &[u8], base: usize, count: usize) -> Option<Self> {
        let size = align(4 * count, 8)?;
        Self::of(bytes, base.checked_sub(size)?, count, base)
    }

    /// Reads offsets behind their own places. `address` is that of the bytes.
    fn from_their_places(bytes: &[u8], start: usize, count: usize, address: u64) -> Option<Self> {
        let behind = Behind::Place(address.wrapping_add(start as u64));
        Self { start, behind }.checked(bytes, count, |first| first >> 47 == 0x1_ffff)
    }

    fn of(bytes: &[u8], start: usize, count: usize, base: usize) -> Option<Self> {
        let base = u64::from_le_bytes(bytes.get(base..)?.first_chunk::<8>().copied()?);
        let has_absolute = words(bytes, start, count)?.any(|word| word < 0);
        let behind = if has_absolute { Behind::BaseIfNegative(base) } else { Behind::Base(base) };
        // The kernel is in the upper half.
        Self { start, behind }.checked(bytes, count, |_| base >> 47 == 0x1_ffff)
    }

    /// Returns these if the addresses ascend, and the first one is as it has to be.
    fn checked(self, bytes: &[u8], count: usize, is_first: impl Fn(u64) -> bool) -> Option<Self> {
        let addresses = || {
            let numbered = words(bytes, self.start, count)?.enumerate();
            Some(numbered.map(|(symbol, word)| self.behind.address(symbol, word)))
        };
        (is_first(addresses()?.next()?) && addresses()?.is_sorted()).then_some(self)
    }

    fn address(&self, bytes: &[u8], symbol: usize) -> Option<u64> {
        let word = word(bytes, self.start.checked_add(4 * symbol)?)?;
        Some(self.behind.address(symbol, word.cast_signed()))
    }
}

/// Returns so many words, no more than there are symbols.
fn words(bytes: &[u8], start: usize, count: usize) -> Option<impl Iterator<Item = i32> + '_> {
    let end = start.checked_add(4 * count)?;
    let (words, _) = bytes.get(start..end).filter(|_| count <= MAX_SYMBOLS)?.as_chunks::<4>();
    Some(words.iter().map(|word| i32::from_le_bytes(*word)))
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk::<4>().map(|word| u32::from_le_bytes(*word))
}

fn align(at: usize, alignment: usize) -> Option<usize> {
    at.checked_next_multiple_of(alignment)
}

#[cfg(test)]
pub mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The order of the tables.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Order {
        OffsetsFirst,
        /// With the order of the names.
        OffsetsFirstSorted,
        OffsetsLast,
        /// Offsets are behind their own places, and all is aligned to 4 bytes.
        OwnPlaces,
    }

    const ALL: [Order; 4] =
        [Order::OffsetsFirst, Order::OffsetsFirstSorted, Order::OffsetsLast, Order::OwnPlaces];

    pub const BASE: u64 = 0xffff_ffff_8100_0000;

    /// The kernel's address of the tables.
    pub const ADDRESS: u64 = BASE + 0x100_0000;

    /// Returns the tables of these symbols: offset behind the base, or an absolute address, and the kind and name. Also
    /// returns where the digits are. Each character is a token, and one token is `sys_`.
    pub fn tables(symbols: &[(i32, &str)], order: Order) -> (Vec<u8>, usize) {
        let mut bytes = vec![0xcc; if order == Order::OwnPlaces { 68 } else { 64 }];
        let alignment = if order == Order::OwnPlaces { 4 } else { 8 };
        let pad = |bytes: &mut Vec<u8>| bytes.resize(bytes.len().next_multiple_of(alignment), 0);
        let offsets = |bytes: &mut Vec<u8>| {
            for (offset, _) in symbols {
                bytes.extend(offset.to_le_bytes());
            }
            pad(bytes);
            bytes.extend(BASE.to_le_bytes());
        };
        if matches!(order, Order::OffsetsFirst | Order::OffsetsFirstSorted) {
            offsets(&mut bytes);
        }
        bytes.extend(u32::try_from(symbols.len()).unwrap().to_le_bytes());
        pad(&mut bytes);
        let start = bytes.len();
        let mut markers = Vec::new();
        for (number, (_, name)) in symbols.iter().enumerate() {
            if number % PER_MARKER == 0 {
                markers.push(u32::try_from(bytes.len() - start).unwrap());
            }
            let name = name.replace("sys_", "\x01");
            match name.len() {
                len @ ..0x80 => bytes.push(u8::try_from(len).unwrap()),
                len => {
                    bytes.extend([u8::try_from(len & 0x7f | 0x80).unwrap(), u8::try_from(len >> 7).unwrap()]);
                }
            }
            bytes.extend(name.bytes());
        }
        pad(&mut bytes);
        bytes.extend(markers.iter().flat_map(|marker| marker.to_le_bytes()));
        pad(&mut bytes);
        if order == Order::OffsetsFirstSorted {
            bytes.extend(
                (0..symbols.len()).rev().flat_map(|number| [0, 0, u8::try_from(number & 0xff).unwrap()]),
            );
            pad(&mut bytes);
        }
        let (mut index, start) = (Vec::new(), bytes.len());
        let mut digits = 0;
        for token in 0..=255_u8 {
            index.push(u16::try_from(bytes.len() - start).unwrap());
            if token == b'0' {
                digits = bytes.len();
            }
            match token {
                1 => bytes.extend(b"sys_"),
                b'!'..=b'~' => bytes.push(token),
                _ => bytes.extend(b"xy"),
            }
            bytes.push(0);
        }
        pad(&mut bytes);
        bytes.extend(index.iter().flat_map(|word| word.to_le_bytes()));
        if order == Order::OffsetsLast {
            offsets(&mut bytes);
        }
        if order == Order::OwnPlaces {
            for (offset, _) in symbols {
                let place = ADDRESS + bytes.len() as u64;
                let behind = (BASE + u64::try_from(*offset).unwrap()).wrapping_sub(place).cast_signed();
                bytes.extend(i32::try_from(behind).unwrap().to_le_bytes());
            }
        }
        bytes.extend([0xcc; 64]);
        (bytes, digits)
    }

    /// Returns symbols that need several markers, with one long name.
    fn many() -> Vec<(i32, String)> {
        let long = (50_000, format!("T{}", "l".repeat(300)));
        (0..600).map(|number| (number * 16, format!("tsys_{number}"))).chain([long]).collect()
    }

    #[test]
    fn all_orders_of_the_tables_are_read() {
        let all = many();
        let given: Vec<(i32, &str)> = all.iter().map(|(offset, name)| (*offset, name.as_str())).collect();
        for order in ALL {
            let (bytes, digits) = tables(&given, order);
            assert_eq!(memmem::find(&bytes, DIGITS), Some(digits));
            let symbols = Symbols::read(&bytes, digits, ADDRESS, &mut Effort::default())
                .unwrap_or_else(|| panic!("{order:?}"));
            assert_eq!(symbols.iter().count(), all.len());
            assert_eq!(symbols.address("sys_599"), Some(BASE + 599 * 16));
            assert_eq!(symbols.address(&"l".repeat(300)), Some(BASE + 50_000));
            assert!(symbols.text().starts_with("ffffffff81000000 t sys_0\nffffffff81000010 t sys_1\n"));
        }
    }

    #[test]
    fn functions_are_found_by_their_addresses_in_the_tables() {
        let mut all = many();
        // Data, and a function that begins where other data does.
        all[300].1 = "dsys_300".into();
        all[301].1 = "Talias".into();
        all.insert(302, (all[301].0, "Dsys_302".into()));
        let given: Vec<(i32, &str)> = all.iter().map(|(offset, name)| (*offset, name.as_str())).collect();
        for order in ALL {
            let (bytes, digits) = tables(&given, order);
            let symbols =
                Symbols::read(&bytes, digits, ADDRESS, &mut Effort::default()).expect("they are symbols");
            let read = |offset: usize, into: &mut [u8]| {
                into.copy_from_slice(bytes.get(offset..offset.checked_add(into.len())?)?);
                Some(())
            };
            let at = |offset: u64| symbols.tables().function(BASE + offset, &read);
            let function = |number: u64, name: &str| {
                let start = BASE + 16 * number;
                Some(Function { start, end: start + 16, name: name.into() })
            };
            for number in (0..599).filter(|number| !(300..=301).contains(number)) {
                for offset in [0, 15] {
                    let expected = function(number, &format!("sys_{number}"));
                    assert_eq!(at(16 * number + offset), expected, "{order:?}");
                }
            }
            assert_eq!(at(16 * 301 + 1), function(301, "alias"), "{order:?}");
            // Data, what is in front of all symbols, and what is behind them.
            assert_eq!(
                [at(16 * 300), at(50_000), symbols.tables().function(BASE - 1, &read)],
                [const { None }; 3]
            );
            // What a guest writes there later gives other names, or none.
            let gone = |_: usize, into: &mut [u8]| {
                into.fill(0xff);
                Some(())
            };
            assert_eq!(symbols.tables().function(BASE, &gone), None);
        }
    }

    #[test]
    fn what_nearly_fits_again_and_again_has_an_end() {
        let all = many();
        let given: Vec<(i32, &str)> = all.iter().map(|(offset, name)| (*offset, name.as_str())).collect();
        for order in ALL {
            let (bytes, digits) = tables(&given, order);
            assert_eq!(Symbols::read(&bytes, digits, ADDRESS, &mut Effort(1000)), None, "{order:?}");
        }
    }

    #[test]
    fn variables_of_each_cpu_may_have_absolute_addresses() {
        let given = [(0x40, "Acurrent_task"), (-1, "T_text"), (-0x101, "Tstart_kernel")];
        let (bytes, digits) = tables(&given, Order::OffsetsFirst);
        let symbols =
            Symbols::read(&bytes, digits, ADDRESS, &mut Effort::default()).expect("they are symbols");
        let found: Vec<_> = symbols.iter().collect();
        assert_eq!(
            found,
            [(0x40, 'A', "current_task"), (BASE, 'T', "_text"), (BASE + 0x100, 'T', "start_kernel")]
        );
    }

    #[test]
    fn a_name_cannot_draw_on_a_terminal_or_add_a_line() {
        let given = [(0, "T_text"), (16, "tan\x1b[2J\nother")];
        let (mut bytes, digits) = tables(&given, Order::OffsetsLast);
        // The tokens of control characters are `xy`: make one a line break and one an escape.
        let at = memmem::find(&bytes, b"xy\0xy\0xy").expect("they are there");
        bytes[at..at + 2].copy_from_slice(b"\n\x1b");
        let text =
            Symbols::read(&bytes, digits, ADDRESS, &mut Effort::default()).expect("they are symbols").text();
        assert_eq!(text.lines().count(), 2, "{text:?}");
        assert!(!text.contains('\x1b'));
    }

    proptest! {
        #[test]
        fn whatever_a_guest_writes_there_is_no_trouble(
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..40),
            order in prop::sample::select(ALL.to_vec()),
            cut in any::<prop::sample::Index>(),
        ) {
            let all = many();
            let given: Vec<(i32, &str)> = all.iter().map(|(offset, name)| (*offset, name.as_str())).collect();
            let (mut bytes, digits) = tables(&given, order);
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            let _ = Symbols::read(&bytes, digits, ADDRESS, &mut Effort::default());
            let _ = Symbols::read(&bytes[..cut.index(bytes.len())], digits, ADDRESS, &mut Effort::default());
        }
    }
}
