//! Retargets a kernel's accesses to its performance counters, so that a virtual machine monitor can trap them.
//!
//! On KVM some of these accesses never reach the VMM's user space, so a VMM cannot emulate a PMU for an unmodified
//! kernel. This crate is for VMMs that load the guest's kernel themselves and can change its image before it runs.
//! - On x86-64, RDPMC (`0F 33`) never exits to user space. RDMSR (`0F 32`) has the same operands and can be made to
//!   exit, so one bit of each RDPMC has to be changed. [`find`] finds the RDPMC instructions of an image.
//! - [`functions`] and [`stub`] let a Linux kernel access its PMU's MSRs on a page that it shares with the VMM while
//!   all counters are frozen, without leaving the guest.
//! - On RISC-V, [`riscv::retarget`] changes SBI calls and CSR reads into SBI calls of the vendor range.
//!
//! # Proofs
//! The bytes `0F 33` also occur inside of other instructions and in data. Changing them there would damage the guest
//! without a trace. So each occurrence is decided by a **proof**. An occurrence without a proof is reported as
//! undecided.
//!
//! A proof decodes instructions from an address at which an instruction is known to begin ([`Proof`] lists where this
//! knowledge comes from):
//! - **Between two boundaries.** The instructions from a known start must be valid and lie end to end up to the next
//!   known start or the end of the function, and no branch among them may lead into the middle of one of them. All
//!   usable starts before the occurrence must agree. How many of them are needed depends on where they are known from.
//! - **By control flow**, for images without information about functions. The proof follows every path of direct jumps
//!   and calls from the entry point. It assumes that calls return.
//!
//! Out of reach are kernel modules, kernels that the guest loads by kexec, code that the guest generates (BPF), and
//! programs in user mode.
//!
//! # Example
//! ```
//! use vpmu_retarget::{Content, Image, Kind, Section, Site, Symbol, find};
//!
//! // mov ecx, edi; rdpmc; ret
//! let mut text = [0x89, 0xf9, 0x0f, 0x33, 0xc3];
//! let address = 0xffff_ffff_8100_0000;
//! let section = Section::new(".text", address, &text, Content::Code).expect("not at the end of the address space");
//! let function = Symbol { name: "native_read_pmc", address, len: 5, content: Content::Code };
//! let image = Image { sections: vec![section], symbols: vec![function], kind: Kind::Linux };
//!
//! let findings = find(&image);
//! assert!(findings.undecided.is_empty());
//! for site in findings.sites {
//!     println!("RDPMC at {site}");
//!     text[(site.byte - address) as usize] = Site::AFTER;
//! }
//! assert_eq!(text, [0x89, 0xf9, 0x0f, 0x32, 0xc3], "RDMSR");
//! ```

#![deny(missing_docs)]

mod decode;
mod flow;
pub mod functions;
pub mod riscv;
mod start;
mod starts;
pub mod stub;
mod sweep;

use std::collections::BTreeSet;
use std::fmt;

use self::decode::Mode;
use self::flow::Flow;
use self::start::Start;
use self::starts::starts;

/// First byte of both opcodes.
const ESCAPE: u8 = 0x0f;
/// Second byte of RDPMC.
const RDPMC: u8 = 0x33;
/// Second byte of RDMSR.
const RDMSR: u8 = 0x32;

/// A kernel image.
pub struct Image<'a> {
    /// The sections, by address.
    pub sections: Vec<Section<'a>>,
    /// The symbols, if there are any.
    pub symbols: Vec<Symbol<'a>>,
    /// The kind of kernel.
    pub kind: Kind,
}

/// Kind of a kernel, which says in which modes its code runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A Linux kernel: 64-bit code, most of it made by a compiler.
    Linux,
    /// A kernel that starts in 32-bit mode and may switch to 64-bit mode.
    BareMetal {
        /// Address of the first instruction.
        entry: u64,
    },
}

/// A section of an image.
#[derive(Debug, Clone, Copy)]
pub struct Section<'a> {
    /// The name, or an empty string.
    pub name: &'a str,
    /// The address at run time.
    pub address: u64,
    /// The content.
    pub bytes: &'a [u8],
    /// Whether the section can be executed.
    pub content: Content,
}

/// What a section or a symbol holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Content {
    /// Instructions, perhaps with data between them.
    Code,
    /// Data that is never executed.
    Data,
}

/// A symbol: a function or an object.
#[derive(Debug, Clone, Copy)]
pub struct Symbol<'a> {
    /// The name.
    pub name: &'a str,
    /// The address at run time.
    pub address: u64,
    /// The length in bytes; 0 if it is not known.
    pub len: u64,
    /// Whether the symbol is a function or an object.
    pub content: Content,
}

/// How it is known where an instruction begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Proof {
    /// From the kernel's ORC unwind tables. All of their addresses are those of instructions: objtool, which makes the
    /// tables when the kernel is built, decodes all of its text.
    Unwind,
    /// From the kernel's table of alternatives: instructions that the kernel may put in the place of others when it
    /// starts.
    Alternative,
    /// From a function of the symbol table, which decodes from its first byte to exactly its last.
    Function,
    /// From the whole section, which decodes from its first byte to exactly its last, with every branch target at the
    /// beginning of an instruction. Data between the code would break this.
    WholeSection,
    /// From the control flow that begins at the entry point.
    Flow,
}

/// An RDPMC instruction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Site {
    /// Address of the instruction, including its prefixes.
    pub address: u64,
    /// Address of the byte to change from [`Site::BEFORE`] to [`Site::AFTER`].
    pub byte: u64,
    /// Name of the function that contains the instruction, if the image has symbols.
    pub function: Option<String>,
    /// How it is known that this is an instruction.
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
    /// The byte before [`Site::byte`].
    pub const ESCAPE: u8 = ESCAPE;
    /// The byte of an RDPMC.
    pub const BEFORE: u8 = RDPMC;
    /// The byte of an RDMSR.
    pub const AFTER: u8 = RDMSR;
}

/// What [`find`] found in an image.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// The RDPMC instructions.
    pub sites: Vec<Site>,
    /// Addresses in code at which the bytes of RDPMC occur, without a proof of what they belong to.
    pub undecided: Vec<u64>,
}

/// What an occurrence of the bytes of RDPMC is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// The opcode of the RDPMC that begins at `start`.
    Rdpmc { start: u64, proof: Proof },
    /// A part of other instructions or of data.
    Other,
    /// Unknown: no proof reaches the occurrence.
    Unreached,
    /// Unknown: proofs contradict each other.
    Contradiction,
}

impl Verdict {
    /// Combines the results of two proofs.
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

/// Finds all RDPMC instructions in an image's code.
pub fn find(image: &Image) -> Findings {
    let code = image.sections.iter().filter(|section| section.content == Content::Code);
    let flow = match image.kind {
        Kind::Linux => None,
        // Without an occurrence there is nothing to decide.
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
    /// Decides what the occurrence at an address is.
    fn decide(&self, section: &Section, starts: &[Start], flow: Option<&Flow>, at: u64) -> Verdict {
        if self.symbols.iter().any(|symbol| symbol.content == Content::Data && symbol.contains(at)) {
            return Verdict::Other;
        }
        let swept = self.modes().iter().map(|mode| sweep::decide(section, *mode, starts, at));
        swept.chain(flow.map(|flow| flow.decide(at))).fold(Verdict::Unreached, Verdict::and)
    }

    /// Returns the modes in which the code may run. RDPMC has the same encoding in all of them.
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
    /// Creates a section. Returns `None` for a section at the end of the address space, where addresses would overflow.
    /// No kernel has one there.
    pub fn new(name: &'a str, address: u64, bytes: &'a [u8], content: Content) -> Option<Self> {
        const ROOM_BEHIND: u64 = 4096;
        address.checked_add(bytes.len() as u64)?.checked_add(ROOM_BEHIND)?;
        Some(Self { name, address, bytes, content })
    }

    /// Returns the addresses at which the two bytes of RDPMC occur.
    fn occurrences(&self) -> impl Iterator<Item = u64> + Clone {
        const CHUNK: usize = 64;
        // This is fast: the second byte is the rarer one, and the compiler vectorizes the search of a whole chunk.
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

    /// Returns the bytes from an address on.
    fn from(&self, address: u64) -> &[u8] {
        let offset = address.checked_sub(self.address).and_then(|offset| usize::try_from(offset).ok());
        offset.and_then(|offset| self.bytes.get(offset..)).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests;
