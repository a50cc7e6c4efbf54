//! Finds the RDPMC instructions of a kernel, so that they can be changed into RDMSR before it runs. For RISC-V kernels,
//! which have other ways to their counters, see [`riscv`].
//!
//! RDPMC (`0F 33`) in a guest never exits to user space. RDMSR (`0F 32`) takes and returns the same registers and can be
//! made to exit, so one bit per instruction is all that differs. But the two bytes occur in other instructions and in
//! data, too, and changing those would damage the guest without a trace. So an occurrence is decided only by a **proof**,
//! and one without is reported as undecided, never guessed.
//!
//! A proof begins where an instruction is known to begin, and decodes from there. What is known, see [`Proof`]:
//! - **Between two boundaries.** The instructions from a known start must lie end to end up to the next known start or
//!   the function's end, none of them invalid, none cut by a branch among them. All starts in front of the occurrence
//!   that can be used have to agree; how many there must be depends on what they are worth.
//! - **By control flow.** For images that tell nothing of their functions: every path from the entry point, through
//!   direct jumps and calls. Calls are taken to return.
//!
//! What nobody finds here: modules, kernels that a guest loads itself (kexec), code that it generates (BPF), and programs
//! in user mode.

mod decode;
mod flow;
pub mod functions;
pub mod riscv;
mod starts;
pub mod stub;
mod sweep;

use std::collections::BTreeSet;
use std::fmt;

use self::decode::Mode;
use self::flow::Flow;
use self::starts::{Start, starts};

/// Both opcodes begin so.
const ESCAPE: u8 = 0x0f;
/// The second byte of RDPMC.
const RDPMC: u8 = 0x33;
/// The second byte of RDMSR.
const RDMSR: u8 = 0x32;

/// What of an image matters here.
pub struct Image<'a> {
    /// Its contents, by address.
    pub sections: Vec<Section<'a>>,
    /// Its symbols, if it has any.
    pub symbols: Vec<Symbol<'a>>,
    /// What runs it, and how its code may be read.
    pub kind: Kind,
}

/// What kind of kernel an image is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// 64-bit code all through, most of it from a compiler.
    Linux,
    /// Code that starts at this address in 32-bit mode, and may change to others.
    BareMetal {
        /// The first instruction.
        entry: u64,
    },
}

/// A part of an image.
#[derive(Debug, Clone, Copy)]
pub struct Section<'a> {
    /// Its name, empty if it has none.
    pub name: &'a str,
    /// Where it is while the kernel runs.
    pub address: u64,
    /// What it is loaded with.
    pub bytes: &'a [u8],
    /// Whether it can run.
    pub content: Content,
}

/// What a section is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// Instructions, perhaps with data between them.
    Code,
    /// Nothing that ever runs.
    Data,
}

/// A name for a function or an object, with its place.
#[derive(Debug, Clone, Copy)]
pub struct Symbol<'a> {
    /// The name.
    pub name: &'a str,
    /// Where it begins.
    pub address: u64,
    /// How long it is; 0 if nobody said.
    pub len: u64,
    /// What is there.
    pub content: Content,
}

/// What an instruction was recognised by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Proof {
    /// The kernel's unwind tables (ORC): each of their addresses is an instruction's, found when the kernel was built by
    /// a tool (objtool) that decodes all of its text from end to end.
    Unwind,
    /// The kernel's table of alternatives: what it puts over other instructions when it knows its processor.
    Alternative,
    /// A function of the symbol table: it decodes from its first byte to exactly its last.
    Function,
    /// Everything in its section: that decodes from its first byte to exactly its last, and each of the many branches in
    /// it goes to where an instruction was found. No data among the code would leave that so.
    WholeSection,
    /// The control flow from the entry point.
    Flow,
}

/// An RDPMC instruction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Site {
    /// Its address, at which its last byte but one is `0F` unless it has prefixes.
    pub address: u64,
    /// The address of the byte to change from [`Site::BEFORE`] to [`Site::AFTER`].
    pub byte: u64,
    /// The function that it is in, if the image has symbols.
    pub function: Option<String>,
    /// How that is known.
    pub proof: Proof,
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.address)?;
        if let Some(function) = &self.function {
            write!(f, " in {function}")?;
        }
        let known_from = match self.proof {
            Proof::Unwind => "the unwind tables",
            Proof::Alternative => "the table of alternatives",
            Proof::Function => "the symbol table",
            Proof::WholeSection => "all of its section",
            Proof::Flow => "the control flow",
        };
        write!(f, " (known from {known_from})")
    }
}

impl Site {
    /// The byte in front of it.
    pub const ESCAPE: u8 = ESCAPE;
    /// The byte that makes it RDPMC.
    pub const BEFORE: u8 = RDPMC;
    /// The byte that makes it RDMSR.
    pub const AFTER: u8 = RDMSR;
}

/// What was found in an image.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// The instructions.
    pub sites: Vec<Site>,
    /// Where the two bytes are in code, and nothing proves what they belong to.
    pub undecided: Vec<u64>,
}

/// What the two bytes at an address are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// The end of the RDPMC that begins here.
    Rdpmc { start: u64, proof: Proof },
    /// Something else.
    Other,
    /// Not known: no proof reaches there.
    Unreached,
    /// Not known: proofs contradict each other.
    Contradiction,
}

impl Verdict {
    /// What two proofs say together.
    fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Unreached, known) | (known, Self::Unreached) => known,
            (Self::Rdpmc { start, proof }, Self::Rdpmc { start: also, .. }) if start == also => {
                Self::Rdpmc { start, proof }
            }
            (Self::Other, Self::Other) => Self::Other,
            _ => Self::Contradiction,
        }
    }
}

/// Finds every RDPMC in an image's code.
pub fn find(image: &Image) -> Findings {
    let code = image.sections.iter().filter(|section| section.content == Content::Code);
    let flow = match image.kind {
        Kind::Linux => None,
        // Only images that have something to decide are worth following.
        Kind::BareMetal { .. } if code.clone().all(|section| section.occurrences().next().is_none()) => None,
        Kind::BareMetal { entry } => Some(Flow::follow(&image.sections, entry)),
    };
    let mut findings = Findings::default();
    let mut seen = BTreeSet::new();
    for section in code {
        let occurrences: Vec<u64> = section.occurrences().collect();
        if occurrences.is_empty() {
            continue;
        }
        let starts = starts(image, section, &occurrences);
        for at in occurrences {
            match image.decide(section, &starts, flow.as_ref(), at) {
                Verdict::Rdpmc { start, proof } if seen.insert(start) => findings.sites.push(Site {
                    address: start,
                    byte: at + 1,
                    function: image.function_at(start).map(str::to_owned),
                    proof,
                }),
                Verdict::Rdpmc { .. } | Verdict::Other => {}
                Verdict::Unreached | Verdict::Contradiction => findings.undecided.push(at),
            }
        }
    }
    findings
}

impl Image<'_> {
    fn decide(&self, section: &Section, starts: &[Start], flow: Option<&Flow>, at: u64) -> Verdict {
        if self.symbols.iter().any(|symbol| symbol.content == Content::Data && symbol.contains(at)) {
            return Verdict::Other;
        }
        let swept = self.modes().iter().map(|mode| sweep::decide(section, *mode, starts, at));
        swept.chain(flow.map(|flow| flow.decide(at))).fold(Verdict::Unreached, Verdict::and)
    }

    /// How code may be meant. RDPMC is the same in both.
    fn modes(&self) -> &'static [Mode] {
        match self.kind {
            Kind::Linux => &[Mode::Bits64],
            Kind::BareMetal { .. } => &[Mode::Bits32, Mode::Bits64],
        }
    }

    fn function_at(&self, address: u64) -> Option<&str> {
        let is_it = |symbol: &&Symbol| symbol.content == Content::Code && symbol.contains(address);
        self.symbols.iter().find(is_it).map(|symbol| symbol.name)
    }
}

impl Symbol<'_> {
    fn contains(&self, address: u64) -> bool {
        address.checked_sub(self.address).is_some_and(|offset| offset < self.len)
    }
}

impl<'a> Section<'a> {
    /// A section, unless it is at the very end of the address space, where no kernel has one and addresses overflow.
    pub fn new(name: &'a str, address: u64, bytes: &'a [u8], content: Content) -> Option<Self> {
        const ROOM_BEHIND: u64 = 4096;
        address.checked_add(bytes.len() as u64)?.checked_add(ROOM_BEHIND)?;
        Some(Self { name, address, bytes, content })
    }

    /// Where the two bytes of an RDPMC are, whatever they are here.
    fn occurrences(&self) -> impl Iterator<Item = u64> + Clone {
        const CHUNK: usize = 64;
        // The second byte is the rarer one, and to look at all bytes of a chunk at once is quick.
        let has_one = |chunk: &[u8]| chunk.iter().fold(0, |any, byte| any | u8::from(*byte == RDPMC)) != 0;
        let chunks = self.bytes.chunks(CHUNK).zip((0..).step_by(CHUNK));
        let seconds = chunks.filter(move |(chunk, _)| has_one(chunk)).flat_map(|(chunk, at)| {
            (at..).zip(chunk).filter(|(_, byte)| **byte == RDPMC).map(|(offset, _)| offset)
        });
        let firsts = seconds.filter_map(|offset: usize| offset.checked_sub(1));
        firsts.filter(|offset| self.bytes[*offset] == ESCAPE).map(|offset| self.address + offset as u64)
    }

    fn end(&self) -> u64 {
        self.address.saturating_add(self.bytes.len() as u64)
    }

    fn contains(&self, address: u64) -> bool {
        (self.address..self.end()).contains(&address)
    }

    /// The bytes from an address on.
    fn from(&self, address: u64) -> &[u8] {
        let offset = address.checked_sub(self.address).and_then(|offset| usize::try_from(offset).ok());
        offset.and_then(|offset| self.bytes.get(offset..)).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests;
