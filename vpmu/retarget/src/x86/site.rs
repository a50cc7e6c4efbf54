//! What is found in an image: RDPMC instructions, and how each is known.

use std::fmt;

use super::decode::Instruction;
use super::image::{ESCAPE, RDPMC};

/// Second byte of RDMSR.
const RDMSR: u8 = 0x32;

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
    /// From a function of a bare-metal kernel that decodes from its first byte to beyond the instruction, though not to
    /// its last byte: it contains data, or code for another mode.
    PartOfFunction,
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
            Proof::Function | Proof::PartOfFunction => "the symbol table",
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

/// What [`find`](super::find) found in an image.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// The RDPMC instructions.
    pub sites: Vec<Site>,
    /// Addresses in code at which the bytes of RDPMC occur, without a proof of what they belong to. Where the work has
    /// reached its bound, this has only the first occurrence of a section.
    pub undecided: Vec<u64>,
}

/// What an occurrence of the bytes of RDPMC is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The opcode of the RDPMC that begins at `start`.
    Rdpmc { start: u64, proof: Proof },
    /// A part of other instructions or of data.
    Other,
    /// Unknown: no proof reaches the occurrence.
    Unreached,
    /// Unknown: what is around the occurrence does not decode in this mode.
    NotCode,
    /// Unknown: proofs contradict each other.
    Contradiction,
}

impl Verdict {
    /// Returns what an occurrence is that this instruction covers.
    pub fn of(covering: &Instruction, at: u64, proof: Proof) -> Self {
        if covering.is_rdpmc && covering.end == at + 2 {
            Self::Rdpmc { start: covering.start, proof }
        } else {
            Self::Other
        }
    }

    /// Combines the results of two proofs.
    pub fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Unreached, known) | (known, Self::Unreached) => known,
            (Self::NotCode, Self::NotCode) => Self::NotCode,
            (Self::Rdpmc { start, proof }, Self::Rdpmc { start: also, .. }) if start == also => {
                Self::Rdpmc { start, proof }
            }
            (Self::Other, Self::Other) => Self::Other,
            _ => Self::Contradiction,
        }
    }
}
