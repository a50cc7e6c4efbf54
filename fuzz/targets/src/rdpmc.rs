//! The search for RDPMC instructions in an x86 kernel, and what is done with its result.
//!
//! Every site that is found is an RDPMC in code. If the sites are changed into RDMSR, the rest of the image is judged
//! as before. The work is bounded whatever the image is.

use std::collections::BTreeSet;

use arbitrary::Arbitrary;
use vpmu_retarget::x86::{
    Content, Findings, Image, Kind, Section, Site, Symbol, exceptions, find, find_in, functions,
    rdpmc_in_programs,
};

const BASE: u64 = 0xffff_ffff_8100_0000;
/// Length of images that are searched with all the work that Tally does. Longer ones are for what is beyond that.
const SMALL: usize = 4 << 10;
/// Steps for the others: one for each byte of the longest section.
const STEPS: u64 = crate::LONGEST as u64;
const NAMES: [&str; 8] = [
    ".text",
    ".altinstr_replacement",
    ".altinstructions",
    ".orc_unwind_ip",
    ".return_sites",
    ".rodata",
    ".init.text",
    "",
];

#[derive(Debug, Arbitrary)]
struct Input {
    is_linux: bool,
    entry: u16,
    sections: Vec<Part>,
    symbols: Vec<Named>,
}

#[derive(Debug, Arbitrary)]
struct Part {
    name: u8,
    is_code: bool,
    /// Distance from the end of the section before; sections may overlap.
    distance: i16,
    bytes: Vec<u8>,
    /// See [`crate::repetitions`].
    repeated: u8,
}

#[derive(Debug, Arbitrary)]
struct Named {
    address: u16,
    len: Len,
    is_function: bool,
}

#[derive(Debug, Clone, Copy, Arbitrary)]
enum Len {
    Short(u8),
    Long(u32),
    Any(u64),
}

fn repeated(part: &Part) -> Vec<u8> {
    let len = part.bytes.len();
    part.bytes.repeat(1 + crate::repetitions(part.repeated, len, len))
}

/// Places the sections one behind the other.
fn sections<'a>(parts: &[Part], contents: &'a [Vec<u8>]) -> Vec<Section<'a>> {
    let mut address = BASE;
    let section = |(part, bytes): (&Part, &'a Vec<u8>)| {
        address = address.wrapping_add_signed(part.distance.into());
        let content = if part.is_code { Content::Code } else { Content::Data };
        let section = Section::new(NAMES[usize::from(part.name) % NAMES.len()], address, bytes, content);
        address = address.wrapping_add(bytes.len() as u64);
        section
    };
    parts.iter().zip(contents).filter_map(section).collect()
}

fn image<'a>(input: &Input, contents: &'a [Vec<u8>]) -> Image<'a> {
    let symbol = |symbol: &Named| Symbol {
        name: "symbol",
        address: BASE + u64::from(symbol.address),
        len: match symbol.len {
            Len::Short(len) => len.into(),
            Len::Long(len) => len.into(),
            Len::Any(len) => len,
        },
        content: if symbol.is_function { Content::Code } else { Content::Data },
    };
    Image {
        sections: sections(&input.sections, contents),
        symbols: input.symbols.iter().map(symbol).collect(),
        kind: if input.is_linux {
            Kind::Linux
        } else {
            Kind::BareMetal { entry: BASE + u64::from(input.entry) }
        },
    }
}

/// Returns the section of code that contains an address, and the offset there.
fn place(image: &Image, address: u64) -> Option<(usize, usize)> {
    let mut code = image.sections.iter().enumerate().filter(|(_, section)| section.content == Content::Code);
    code.find_map(|(index, section)| {
        let offset = usize::try_from(address.checked_sub(section.address)?).ok()?;
        (offset < section.bytes.len()).then_some((index, offset))
    })
}

/// Runs the target.
pub fn run(data: &[u8]) {
    let Some(mut input) = crate::parse::<Input>(data) else { return };
    // Only the sections that have bytes at valid addresses are in the image; here all have.
    input.sections.truncate(8);
    let contents: Vec<Vec<u8>> = input.sections.iter().map(repeated).collect();
    let image = image(&input, &contents);
    let is_small = contents.iter().map(Vec::len).sum::<usize>() <= SMALL;
    let findings = if is_small { find(&image) } else { find_in(&image, STEPS) };
    let sites: BTreeSet<u64> = findings.sites.iter().map(|site| site.address).collect();
    assert_eq!(sites.len(), findings.sites.len(), "a site was found twice");
    for site in &findings.sites {
        assert!(place(&image, site.byte).is_some(), "{site} is not in code");
        let _ = site.to_string();
    }
    let table = functions::table(&image, &findings.sites);
    assert!(table.is_none() || findings.sites.len() == 1);
    let record = exceptions::only_record(&image, exceptions::GENERAL_PROTECTION);
    let debug = exceptions::handler(&image, exceptions::DEBUG);
    if let (Some(record), Some(debug)) = (record, debug) {
        let handlers = rdpmc_in_programs::Handlers { general_protection: record.address, debug };
        let _ = rdpmc_in_programs::room(&image, 256, handlers);
    }
    if is_small {
        unchanged_otherwise(&input, &contents, &image, &findings);
    }
}

/// Changes the sites, and checks that all other occurrences are judged as before.
fn unchanged_otherwise(input: &Input, contents: &[Vec<u8>], before: &Image, findings: &Findings) {
    let overlap = before.sections.iter().enumerate().any(|(index, one)| {
        let end = |section: &Section| section.address + section.bytes.len() as u64;
        before.sections[index + 1..].iter().any(|other| one.address < end(other) && other.address < end(one))
    });
    // In overlapping sections, one instruction has bytes in several places. Empty and misplaced sections have none.
    if overlap || before.sections.len() != contents.len() || findings.sites.is_empty() {
        return;
    }
    let mut changed = contents.to_vec();
    for site in &findings.sites {
        let (section, offset) = place(before, site.byte).expect("it was checked");
        let bytes = &mut changed[section][offset - 1..=offset];
        assert_eq!(bytes, [Site::ESCAPE, Site::BEFORE], "{site}");
        bytes[1] = Site::AFTER;
    }
    let again = find(&image(input, &changed));
    assert_eq!((again.sites, again.undecided), (Vec::new(), findings.undecided.clone()));
}
