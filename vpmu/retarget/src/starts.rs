//! Where instructions are known to begin.

use std::ops::Range;

use super::decode::Mode;
use super::{Content, Image, Kind, Proof, Section, sweep};

/// The section of the alternatives' instructions.
const REPLACEMENTS: &str = ".altinstr_replacement";

/// The beginning of an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Start {
    /// Where it is.
    pub address: u64,
    /// How that is known.
    pub kind: Proof,
    /// Where what is known of ends, if that is before the next start.
    pub end: Option<u64>,
}

/// The starts that are known in a section, in order: all of them, or those that matter for the occurrences.
pub fn starts(image: &Image, section: &Section, occurrences: &[u64]) -> Vec<Start> {
    let alternatives = alternatives(image);
    let mut starts: Vec<Start> = if section.name == REPLACEMENTS {
        alternatives.iter().map(Alternative::start).collect()
    } else {
        let known = unwind(image).chain(functions(image));
        known.filter(|start| section.contains(start.address)).collect()
    };
    starts.sort_unstable();
    // Unwind tables describe the replacement in the middle of what an alternative replaces, too, so one of their addresses
    // there need not be an instruction's before.
    let mut behind = alternatives.iter().peekable();
    let mut nearest = None;
    starts.retain(|start| {
        while let Some(next) = behind.next_if(|alternative| alternative.place.start < start.address) {
            nearest = Some(next);
        }
        let cuts = |alternative: &Alternative| start.address < alternative.place.end;
        start.kind != Proof::Unwind || !nearest.is_some_and(cuts)
    });
    if starts.is_empty() && image.kind == Kind::Linux {
        starts = whole(section, occurrences);
    }
    starts.dedup_by_key(|start| start.address);
    starts
}

/// Where something is known to begin, wherever that is.
pub fn known<'a>(image: &'a Image) -> impl Iterator<Item = u64> + use<'a> {
    unwind(image).chain(functions(image)).map(|start| start.address)
}

fn section<'a>(image: &'a Image, name: &str) -> Option<&'a Section<'a>> {
    image.sections.iter().find(|section| section.name == name)
}

/// A signed 32-bit number and its own address, which is what the kernel's tables count from.
fn relative(field: &[u8], address: u64) -> Option<u64> {
    let offset = i32::from_le_bytes(*field.first_chunk()?);
    Some(address.wrapping_add_signed(offset.into()))
}

/// The addresses of the unwind table (`.orc_unwind_ip`, `arch/x86/kernel/unwind_orc.c`).
fn unwind<'a>(image: &'a Image) -> impl Iterator<Item = Start> + use<'a> {
    let table = section(image, ".orc_unwind_ip");
    table.into_iter().flat_map(|table| {
        let entries = table.bytes.chunks_exact(4).zip((table.address..).step_by(4));
        entries.filter_map(|(entry, address)| {
            Some(Start { address: relative(entry, address)?, kind: Proof::Unwind, end: None })
        })
    })
}

/// Where functions return, in kernels that change how when they know their processor (`.return_sites`), in order.
pub fn returns(image: &Image) -> Vec<u64> {
    let table = section(image, ".return_sites");
    let sites = table.into_iter().flat_map(|table| {
        let entries = table.bytes.chunks_exact(4).zip((table.address..).step_by(4));
        entries.filter_map(|(entry, address)| relative(entry, address))
    });
    let mut sites: Vec<u64> = sites.collect();
    sites.sort_unstable();
    sites
}

/// The functions of the symbol table.
fn functions<'a>(image: &'a Image) -> impl Iterator<Item = Start> + use<'a> {
    let functions = image.symbols.iter().filter(|symbol| symbol.content == Content::Code);
    functions.map(|symbol| Start {
        address: symbol.address,
        kind: Proof::Function,
        end: (symbol.len != 0).then(|| symbol.address.saturating_add(symbol.len)),
    })
}

/// Instructions that the kernel may put in the place of others (`.altinstructions`).
struct Alternative {
    place: Range<u64>,
    replacement: u64,
}

impl Alternative {
    fn start(&self) -> Start {
        Start { address: self.replacement, kind: Proof::Alternative, end: None }
    }
}

/// The table of alternatives, by place.
///
/// An entry begins with the relative addresses of the place and of the replacement, and ends with the lengths of both.
/// It has become longer and shorter with time (`struct alt_instr`): the right length is the one with which every entry
/// points where it should.
fn alternatives(image: &Image) -> Vec<Alternative> {
    /// An entry's length, and where the place's length is in it.
    const LAYOUTS: [(usize, usize); 3] = [(12, 10), (13, 10), (14, 12)];
    let (Some(table), Some(replacements)) =
        (section(image, ".altinstructions"), section(image, REPLACEMENTS))
    else {
        return Vec::new();
    };
    let read = |(len, place_len): (usize, usize)| {
        let entries = table.bytes.chunks_exact(len).zip((table.address..).step_by(len));
        let alternatives = entries.map(|(entry, address)| {
            let start = relative(entry, address)?;
            let replacement = relative(&entry[4..], address + 4)?;
            let is_there = (replacements.address..=replacements.end()).contains(&replacement);
            is_there.then(|| Alternative {
                place: start..start.saturating_add(entry[place_len].into()),
                replacement,
            })
        });
        let whole = table.bytes.len() % len == 0;
        whole.then(|| alternatives.collect::<Option<Vec<Alternative>>>())?
    };
    let mut alternatives = LAYOUTS.into_iter().find_map(read).unwrap_or_default();
    alternatives.sort_unstable_by_key(|alternative| (alternative.place.start, alternative.place.end));
    alternatives
}

/// What decoding a whole section tells of the instructions around some addresses, if it is nothing but instructions.
fn whole(section: &Section, occurrences: &[u64]) -> Vec<Start> {
    let boundaries =
        sweep::boundaries(section, Mode::Bits64, section.address..section.end()).unwrap_or_default();
    let around = |at: &u64| {
        let behind = boundaries.partition_point(|boundary| boundary <= at);
        let end = boundaries.get(behind).copied();
        let start = boundaries.get(behind.checked_sub(1)?)?;
        Some(Start { address: *start, kind: Proof::WholeSection, end })
    };
    occurrences.iter().filter_map(around).collect()
}
