//! Finds the functions by which Linux accesses registers, where it calls them through a table.
//!
//! A kernel that can also run as Xen's guest (`PARAVIRT_XXL`, as distributions' can) accesses nearly all registers by calls
//! through a table of functions (`pv_ops`), of which each call becomes a direct one when the kernel starts. Five in a row read
//! and write registers: the plain two, the two that may fail, and RDPMC. So whoever stands in for one of them needs no
//! change of code: its address in the table is all.
//!
//! The table is known by the RDPMC that was found ([`super::find`]): of all words of the kernel's data there must be exactly
//! one that is the address of a function which comes to that instruction with its argument in place, behind four more
//! whose first two do the same with RDMSR and WRMSR.

use iced_x86::{Code, Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register};

use super::starts::{known, returns};
use super::{Content, Image, Section, Site};
use crate::stub::{Original, Originals, Value};

/// The functions, and what is needed to stand in for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Table {
    /// The functions.
    pub originals: Originals,
    /// Where the address of the first is; that of the second is behind it.
    pub address: u64,
}

impl Table {
    /// Where the address of [`Originals::read`] is.
    pub fn read(&self) -> u64 {
        self.address
    }

    /// The same for [`Originals::write`].
    pub fn write(&self) -> u64 {
        self.address + WORD
    }

    /// The same for [`Originals::read_counter`].
    pub fn read_counter(&self) -> u64 {
        self.address + READ_COUNTER as u64 * WORD
    }
}

/// Of a word of the table.
const WORD: u64 = 8;
/// Where the table has the function with the RDPMC.
const READ_COUNTER: usize = 4;
/// So far behind a function's beginning is the instruction that it is for, at most.
const NEAR: u64 = 24;
/// What fills a kernel's text where there is no function.
const FILLING: u8 = 0xcc;

/// Finds the table, if these are its kernel's only RDPMC.
pub fn table(image: &Image, sites: &[Site]) -> Option<Table> {
    let [site] = sites else { return None };
    let text = image.sections.iter().find(|section| is_code(section) && section.contains(site.address))?;
    let returns = returns(image);
    let found = |words: &[[u8; 8]], address| {
        let function = |index: usize| Some(u64::from_le_bytes(*words.get(index)?));
        let original = |index, code: &[Code]| Function::at(text, function(index)?, code, &returns);
        let reads = |function: Function| (function.sources == READS).then_some(function.original);
        let write = original(1, &[Code::Wrmsr])?;
        let value = match write.sources {
            WRITES_HALVES => Value::Halves,
            WRITES_WHOLE => Value::Whole,
            _ => return None,
        };
        let originals = Originals {
            read: reads(original(0, &[Code::Rdmsr])?)?,
            write: write.original,
            value,
            // It has been retargeted, or not yet.
            read_counter: reads(original(READ_COUNTER, &[Code::Rdpmc, Code::Rdmsr])?)?,
        };
        Some(Table { originals, address })
    };
    let is_near = |word: &[u8; 8]| site.address.wrapping_sub(u64::from_le_bytes(*word)) <= NEAR;
    let data = image.sections.iter().filter(|section| section.content == Content::Data);
    let mut tables = data.flat_map(|section| {
        let begin = section.address.next_multiple_of(WORD);
        let (words, _) = section.from(begin).as_chunks();
        positions(words, is_near).filter_map(move |entry| {
            let first = entry.checked_sub(READ_COUNTER)?;
            found(&words[first..], begin + first as u64 * WORD)
        })
    });
    let table = tables.next()?;
    tables.next().is_none().then_some(table)
}

/// Where words are of which that is true. They are millions, and it is true of next to none: to ask many at once is quick.
fn positions<'a>(
    words: &'a [[u8; 8]],
    is_one: impl Fn(&[u8; 8]) -> bool + Copy + 'a,
) -> impl Iterator<Item = usize> + 'a {
    const CHUNK: usize = 64;
    let has_one =
        move |words: &[[u8; 8]]| words.iter().fold(0, |any, word| any | u8::from(is_one(word))) != 0;
    let chunks = words.chunks(CHUNK).zip((0..).step_by(CHUNK)).filter(move |(chunk, _)| has_one(chunk));
    chunks.flat_map(move |(chunk, begin)| {
        (begin..).zip(chunk).filter(move |(_, word)| is_one(word)).map(|(position, _)| position)
    })
}

/// Where there is room for so much code: in the filling of the text, away from what is around it.
pub fn room(image: &Image, len: usize) -> Option<u64> {
    const CHUNK: usize = 256;
    let needed = len.div_ceil(CHUNK) + 2;
    // A table of the kernel's may say that something begins in what looks empty. Without one nobody knows.
    let known: Vec<u64> = known(image).collect();
    let text = image.sections.iter().find(|section| is_code(section) && section.name == ".text")?;
    let mut filled = 0;
    for (index, chunk) in text.bytes.chunks_exact(CHUNK).enumerate() {
        filled = if chunk.iter().all(|byte| *byte == FILLING) { filled + 1 } else { 0 };
        if filled == needed {
            let begin = text.address + ((index + 1 - needed) * CHUNK) as u64;
            let all = begin..begin + (needed * CHUNK) as u64;
            if !known.is_empty() && !known.iter().any(|address| all.contains(address)) {
                return Some(begin + CHUNK as u64);
            }
            filled = 0;
        }
    }
    None
}

fn is_code(section: &Section) -> bool {
    section.content == Content::Code
}

/// What is in a register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    /// The lower half of what was in a register at the function's beginning, or all of it where nobody asks for more.
    Argument(Register),
    /// All of it.
    Whole(Register),
    /// The upper half.
    Upper(Register),
}

/// What is in ECX, EAX and EDX.
type Sources = [Source; 3];

const UNTOUCHED: Sources =
    [Source::Argument(Register::RCX), Source::Argument(Register::RAX), Source::Argument(Register::RDX)];
const READS: Sources = [Source::Argument(Register::RDI), UNTOUCHED[1], UNTOUCHED[2]];
const WRITES_HALVES: Sources = [READS[0], Source::Argument(Register::RSI), UNTOUCHED[2]];
const WRITES_WHOLE: Sources = [READS[0], WRITES_HALVES[1], Source::Upper(Register::RSI)];

/// A function that has been followed to the instruction that it is for.
struct Function {
    original: Original,
    /// What the instruction is given.
    sources: Sources,
}

impl Function {
    /// The function that begins there, if it is as simple as can be: arguments are moved, a register may be saved, then
    /// comes the instruction, and sooner or later a return.
    fn at(text: &Section, entry: u64, codes: &[Code], returns: &[u64]) -> Option<Self> {
        if !text.contains(entry) {
            return None;
        }
        let mut decoder = Decoder::with_ip(64, text.from(entry), entry, DecoderOptions::NONE);
        let near =
            |instruction: &Instruction| instruction.ip() - entry <= 2 * NEAR && !instruction.is_invalid();
        let mut instructions = decoder.iter().take_while(near);
        let mut sources = UNTOUCHED;
        loop {
            let instruction = instructions.next()?;
            if codes.contains(&instruction.code()) {
                break;
            }
            prepare(&instruction, &mut sources)?;
        }
        let leaves = |instruction: &Instruction| {
            instruction.op0_kind() == OpKind::NearBranch64
                || matches!(
                    instruction.mnemonic(),
                    Mnemonic::Ret | Mnemonic::Jmp | Mnemonic::Call | Mnemonic::Int3
                )
        };
        let exit = instructions.find(leaves)?;
        let returns = exit.code() == Code::Retnq
            || exit.code() == Code::Jmp_rel32_64 && returns.binary_search(&exit.ip()).is_ok();
        if !returns {
            return None;
        }
        Some(Self { original: Original { entry, exit: exit.ip() }, sources })
    }
}

/// What an instruction in front of the one that matters does to the registers that matter.
fn prepare(instruction: &Instruction, sources: &mut Sources) -> Option<()> {
    let place = |register: Register| match register {
        Register::RCX | Register::ECX => Some(0),
        Register::RAX | Register::EAX => Some(1),
        Register::RDX | Register::EDX => Some(2),
        _ => None,
    };
    let [to, from] = [instruction.op0_register(), instruction.op1_register()];
    match (instruction.code(), from) {
        (Code::Endbr64 | Code::Push_r64, _) => {}
        (Code::Mov_rm32_r32 | Code::Mov_r32_rm32, Register::EDI) => {
            sources[place(to)?] = Source::Argument(Register::RDI);
        }
        (Code::Mov_rm32_r32 | Code::Mov_r32_rm32, Register::ESI) => {
            sources[place(to)?] = Source::Argument(Register::RSI);
        }
        (Code::Mov_rm64_r64 | Code::Mov_r64_rm64, Register::RSI) => {
            sources[place(to)?] = Source::Whole(Register::RSI);
        }
        (Code::Shr_rm64_imm8, _) if instruction.immediate8() == 32 => {
            let source = &mut sources[place(to)?];
            let Source::Whole(register) = *source else { return None };
            *source = Source::Upper(register);
        }
        _ => return None,
    }
    Some(())
}

#[cfg(test)]
mod tests;
