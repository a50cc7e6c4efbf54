//! Reads the section headers and symbols of an ELF file, which show what is code and name the functions.
//!
//! A kernel boots without this information, so missing or damaged headers are not an error. They are treated as absent.

use std::io::{Read, Seek};
use std::ops::Range;

use vpmu_retarget::x86::{Content, Section, Symbol};

use super::elf::{Class, is_elf};
use crate::loader::bytes::{u16_at, u32_at, u64_at};
use crate::loader::error::Problem;
use crate::loader::file::read_range;

const SHT_SYMTAB: u32 = 2;
const SHT_NOBITS: u32 = 8;
const SHF_WRITE: u64 = 1;
const SHF_ALLOC: u64 = 2;
const SHF_EXECINSTR: u64 = 4;
const STT_OBJECT: u8 = 1;
const STT_FUNC: u8 = 2;

/// Loaded sections and symbols of an ELF file.
#[derive(Debug, Default)]
pub struct Sections {
    loaded: Vec<Header>,
    names: Vec<u8>,
    symbols: Vec<u8>,
    symbol_names: Vec<u8>,
    class: Option<Class>,
}

#[derive(Debug, Clone)]
struct Header {
    name: usize,
    kind: u32,
    flags: u64,
    address: u64,
    file: Range<u64>,
    link: usize,
}

impl Sections {
    /// Reads the section headers and the symbols. Returns `None` if the file is not ELF or its section headers are
    /// missing or damaged.
    pub fn read(file: &mut (impl Read + Seek), len: u64) -> Option<Self> {
        let mut read = |range: Range<u64>| -> Option<Vec<u8>> {
            let there = range.start <= range.end && range.end <= len;
            there.then(|| read_range(file, range).map_err(|_: Problem| ()).ok())?
        };
        let head = read(0..len.min(64))?;
        let class = match head.get(4)? {
            _ if !is_elf(&head) => return None,
            1 => Class::Bits32,
            _ => Class::Bits64,
        };
        let (table, fields) = match class {
            Class::Bits32 => (u32_at(&head, 32)?.into(), 46),
            Class::Bits64 => (u64_at(&head, 40)?, 58),
        };
        let field = |index: usize| u16_at(&head, fields + 2 * index).map(u64::from);
        let (entry, entries, names) = (field(0)?, field(1)?, field(2)?);
        if entry != class.section_header_len() {
            return None;
        }
        let table = read(table..table.checked_add(entry * entries)?)?;
        let headers: Vec<Header> = table
            .chunks_exact(usize::try_from(entry).ok()?)
            .map(|entry| Header::parse(class, entry))
            .collect::<Option<_>>()?;
        let names = read(headers.get(usize::try_from(names).ok()?)?.file.clone())?;
        let table = headers.iter().find(|header| header.kind == SHT_SYMTAB);
        let symbols = table.and_then(|table| {
            let strings = headers.get(table.link)?;
            Some((read(table.file.clone())?, read(strings.file.clone())?))
        });
        let (symbols, symbol_names) = symbols.unwrap_or_default();
        let is_loaded = |header: &Header| header.flags & SHF_ALLOC != 0 && header.kind != SHT_NOBITS;
        let loaded = headers.into_iter().filter(is_loaded).collect();
        Some(Self { loaded, names, symbols, symbol_names, class: Some(class) })
    }

    /// Returns true if the file's sections show what is code.
    pub fn tell_code(&self) -> bool {
        self.loaded.iter().any(|header| header.flags & SHF_EXECINSTR != 0)
    }

    /// Returns the sections with their bytes in the image. Sections that are both writable and executable have the
    /// content `written`: they are code in images that may execute writable memory, and data in Linux, which does not.
    pub fn list<'a>(&'a self, image: &'a [u8], written: Content) -> Vec<Section<'a>> {
        let section = |header: &'a Header| {
            let start = usize::try_from(header.file.start).ok()?;
            let end = usize::try_from(header.file.end).ok()?;
            let content = match header.flags & (SHF_WRITE | SHF_EXECINSTR) {
                SHF_EXECINSTR => Content::Code,
                flags if flags & SHF_EXECINSTR != 0 => written,
                _ => Content::Data,
            };
            Section::new(text(&self.names, header.name), header.address, image.get(start..end)?, content)
        };
        self.loaded.iter().filter_map(section).collect()
    }

    /// Returns the symbols of functions and objects.
    pub fn symbols(&self) -> impl Iterator<Item = Symbol<'_>> {
        let class = self.class.unwrap_or(Class::Bits64);
        self.symbols.chunks_exact(class.symbol_len()).filter_map(move |entry| {
            let (kind, address, len) = match class {
                Class::Bits32 => (*entry.get(12)?, u32_at(entry, 4)?.into(), u32_at(entry, 8)?.into()),
                Class::Bits64 => (*entry.get(4)?, u64_at(entry, 8)?, u64_at(entry, 16)?),
            };
            let content = match kind & 0xf {
                STT_OBJECT => Content::Data,
                STT_FUNC => Content::Code,
                _ => return None,
            };
            Some(Symbol { name: text(&self.symbol_names, u32_at(entry, 0)? as usize), address, len, content })
        })
    }
}

impl Class {
    fn section_header_len(self) -> u64 {
        match self {
            Self::Bits32 => 40,
            Self::Bits64 => 64,
        }
    }

    fn symbol_len(self) -> usize {
        match self {
            Self::Bits32 => 16,
            Self::Bits64 => 24,
        }
    }
}

impl Header {
    fn parse(class: Class, entry: &[u8]) -> Option<Self> {
        let word = |index: usize| match class {
            Class::Bits32 => u32_at(entry, 8 + 4 * index).map(u64::from),
            Class::Bits64 => u64_at(entry, 8 + 8 * index),
        };
        let link = match class {
            Class::Bits32 => 24,
            Class::Bits64 => 40,
        };
        let (start, len) = (word(2)?, word(3)?);
        Some(Self {
            name: u32_at(entry, 0)? as usize,
            kind: u32_at(entry, 4)?,
            flags: word(0)?,
            address: word(1)?,
            file: start..start.checked_add(len)?,
            link: u32_at(entry, link)? as usize,
        })
    }
}

/// Returns the string at an offset in a string table, or an empty string if there is none.
fn text(table: &[u8], at: usize) -> &str {
    let rest = table.get(at..).unwrap_or_default();
    let text = rest.split(|byte| *byte == 0).next().unwrap_or_default();
    str::from_utf8(text).unwrap_or_default()
}
