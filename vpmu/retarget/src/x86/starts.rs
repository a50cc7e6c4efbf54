//! Addresses at which instructions are known to begin.

use std::ops::Range;

use super::decode::Mode;
use super::image::{Content, Image, Kind, Section};
use super::site::Proof;
use super::start::Start;
use super::sweep;
use super::work::Work;

/// The section with the replacement instructions of the alternatives.
const REPLACEMENTS: &str = ".altinstr_replacement";

/// Returns the known starts of a section in ascending order. For a section that is known only as a whole, it returns
/// those around the occurrences.
pub fn starts(image: &Image, section: &Section, occurrences: &[u64], work: &Work) -> Vec<Start> {
    let alternatives = alternatives(image);
    let mut starts: Vec<Start> = if section.name == REPLACEMENTS {
        alternatives.iter().map(Alternative::start).collect()
    } else {
        let known = unwind(image).chain(functions(image));
        known.filter(|start| section.contains(start.address)).collect()
    };
    starts.sort_unstable();
    // Unwind tables also describe the replacement at the addresses of the instructions that an alternative replaces. So
    // one of their addresses inside of these need not be the beginning of an instruction before the replacement.
    let mut ahead = alternatives.iter().peekable();
    let mut nearest = None;
    starts.retain(|start| {
        while let Some(next) = ahead.next_if(|alternative| alternative.original.start < start.address) {
            nearest = Some(next);
        }
        let cuts = |alternative: &Alternative| start.address < alternative.original.end;
        start.kind != Proof::Unwind || !nearest.is_some_and(cuts)
    });
    if starts.is_empty() && image.kind == Kind::Linux {
        starts = whole(section, occurrences, work);
    }
    starts.dedup_by_key(|start| start.address);
    starts
}

/// Returns all known starts of an image, in any section.
pub fn known<'a>(image: &'a Image) -> impl Iterator<Item = u64> + use<'a> {
    unwind(image).chain(functions(image)).map(|start| start.address)
}

fn section<'a>(image: &'a Image, name: &str) -> Option<&'a Section<'a>> {
    image.sections.iter().find(|section| section.name == name)
}

/// Returns the address in a field of the kernel's tables: a signed 32-bit offset from the field's own address.
fn relative(field: &[u8], address: u64) -> Option<u64> {
    let offset = i32::from_le_bytes(*field.first_chunk()?);
    Some(address.wrapping_add_signed(offset.into()))
}

/// Returns the addresses of the unwind table (`.orc_unwind_ip`, `arch/x86/kernel/unwind_orc.c`).
fn unwind<'a>(image: &'a Image) -> impl Iterator<Item = Start> + use<'a> {
    let table = section(image, ".orc_unwind_ip");
    table.into_iter().flat_map(|table| {
        let entries = table.bytes.chunks_exact(4).zip((table.address..).step_by(4));
        entries.filter_map(|(entry, address)| {
            Some(Start { address: relative(entry, address)?, kind: Proof::Unwind, end: None })
        })
    })
}

/// Returns the addresses of the kernel's return instructions in ascending order. Kernels that choose their return
/// instruction at boot, for mitigations of processor bugs, list them in `.return_sites`.
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

/// Returns the functions of the symbol table.
fn functions<'a>(image: &'a Image) -> impl Iterator<Item = Start> + use<'a> {
    let functions = image.symbols.iter().filter(|symbol| symbol.content == Content::Code);
    functions.map(|symbol| Start {
        address: symbol.address,
        kind: Proof::Function,
        end: (symbol.len != 0).then(|| symbol.address.saturating_add(symbol.len)),
    })
}

/// Instructions that the kernel may replace by others at boot (`.altinstructions`).
struct Alternative {
    /// Addresses of the instructions that are replaced.
    original: Range<u64>,
    /// Address of the replacement instructions.
    replacement: u64,
}

impl Alternative {
    fn start(&self) -> Start {
        Start { address: self.replacement, kind: Proof::Alternative, end: None }
    }
}

/// Returns the table of alternatives, ordered by the address of the original instructions.
///
/// An entry begins with the relative addresses of the original and the replacement instructions, and ends with the
/// lengths of both. The length of an entry depends on the kernel's version (`struct alt_instr`). It is the one with
/// which all entries point into the section of replacements.
fn alternatives(image: &Image) -> Vec<Alternative> {
    /// Length of an entry, and offset of the original's length in it.
    const LAYOUTS: [(usize, usize); 3] = [(12, 10), (13, 10), (14, 12)];
    let (Some(table), Some(replacements)) =
        (section(image, ".altinstructions"), section(image, REPLACEMENTS))
    else {
        return Vec::new();
    };
    let read = |(len, original_len): (usize, usize)| {
        let entries = table.bytes.chunks_exact(len).zip((table.address..).step_by(len));
        let alternatives = entries.map(|(entry, address)| {
            let start = relative(entry, address)?;
            let replacement = relative(&entry[4..], address + 4)?;
            let is_inside = (replacements.address..=replacements.end()).contains(&replacement);
            is_inside.then(|| Alternative {
                original: start..start.saturating_add(entry[original_len].into()),
                replacement,
            })
        });
        let divides = table.bytes.len() % len == 0;
        divides.then(|| alternatives.collect::<Option<Vec<Alternative>>>())?
    };
    let mut alternatives = LAYOUTS.into_iter().find_map(read).unwrap_or_default();
    alternatives.sort_unstable_by_key(|alternative| (alternative.original.start, alternative.original.end));
    alternatives
}

/// Returns the instructions around the occurrences of a section that consists of instructions only. Returns none for a
/// section that does not.
fn whole(section: &Section, occurrences: &[u64], work: &Work) -> Vec<Start> {
    let all = section.address..section.end();
    let boundaries = sweep::boundaries(section, Mode::Bits64, all, work).unwrap_or_default();
    let around = |at: &u64| {
        let behind = boundaries.partition_point(|boundary| boundary <= at);
        let end = boundaries.get(behind).copied();
        let start = boundaries.get(behind.checked_sub(1)?)?;
        Some(Start { address: *start, kind: Proof::WholeSection, end })
    };
    occurrences.iter().filter_map(around).collect()
}
