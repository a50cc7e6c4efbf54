//! Finds the functions by which Linux accesses MSRs, and the table through which it calls them.
//!
//! A kernel that can run as a Xen PV guest (`PARAVIRT_XXL`, which distributions set) accesses nearly all MSRs by calls
//! through a table of functions, `pv_ops`. When the kernel starts, it turns each of these calls into a direct call.
//! Five consecutive entries access MSRs: read, write, read and write with fault handling, and RDPMC. So a function is
//! replaced by changing its address in the table; no code has to be changed.
//!
//! The table is found by the RDPMC instruction ([`super::find`]). Exactly one word of the kernel's data must be the
//! address of a function that executes that instruction with its argument in ECX. The four words before it must be
//! addresses, too, and the first two of them must be of functions that do the same with RDMSR and WRMSR.

use iced_x86::{Code, Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register};

use super::image::{Content, Image, Section};
use super::site::Site;
use super::starts::returns;
use super::stub::{Original, Originals, Value};
use super::words::{WORD, Words, positions};

/// The kernel's table of functions that access MSRs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Table {
    /// The functions that can be replaced.
    pub originals: Originals,
    /// Address of the table's first entry.
    pub address: u64,
}

impl Table {
    /// Returns the address of the table entry for [`Originals::read`].
    pub fn read(&self) -> u64 {
        self.address
    }

    /// Returns the address of the table entry for [`Originals::write`].
    pub fn write(&self) -> u64 {
        self.address + WORD
    }

    /// Returns the address of the table entry for [`Originals::read_counter`].
    pub fn read_counter(&self) -> u64 {
        self.address + READ_COUNTER as u64 * WORD
    }
}

/// Index of the table entry for the function with the RDPMC.
const READ_COUNTER: usize = 4;
/// Maximum distance from the beginning of a function to its RDMSR, WRMSR or RDPMC.
const NEAR: u64 = 24;

/// Finds the table. `sites` are the kernel's RDPMC instructions; there must be exactly one.
pub fn table(image: &Image, sites: &[Site]) -> Option<Table> {
    let [site] = sites else { return None };
    let text = image.code_at(site.address)?;
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
            // The image may have been retargeted already.
            read_counter: reads(original(READ_COUNTER, &[Code::Rdpmc, Code::Rdmsr])?)?,
        };
        Some(Table { originals, address })
    };
    let is_near = |word: &[u8; 8]| site.address.wrapping_sub(u64::from_le_bytes(*word)) <= NEAR;
    let data = image.sections.iter().filter(|section| section.content == Content::Data);
    let mut tables = data.flat_map(|section| {
        let Words { address, words } = Words::of(section);
        positions(words, is_near).filter_map(move |entry| {
            let first = entry.checked_sub(READ_COUNTER)?;
            found(&words[first..], address + first as u64 * WORD)
        })
    });
    let table = tables.next()?;
    tables.next().is_none().then_some(table)
}

/// Value of a register, in terms of the registers at the beginning of the function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    /// The lower half of this register. The upper half is not known and does not matter.
    Argument(Register),
    /// All of this register.
    Whole(Register),
    /// The upper half of this register.
    Upper(Register),
}

/// Values of ECX, EAX and EDX.
type Sources = [Source; 3];

const UNTOUCHED: Sources =
    [Source::Argument(Register::RCX), Source::Argument(Register::RAX), Source::Argument(Register::RDX)];
const READS: Sources = [Source::Argument(Register::RDI), UNTOUCHED[1], UNTOUCHED[2]];
const WRITES_HALVES: Sources = [READS[0], Source::Argument(Register::RSI), UNTOUCHED[2]];
const WRITES_WHOLE: Sources = [READS[0], WRITES_HALVES[1], Source::Upper(Register::RSI)];

/// A function that accesses an MSR, or reads a counter, with its arguments.
struct Function {
    original: Original,
    /// Values of the operands of its RDMSR, WRMSR or RDPMC.
    sources: Sources,
}

impl Function {
    /// Decodes the function at `entry`. Returns `None` unless it has the simplest form: it moves arguments, may save a
    /// register, executes one of `codes`, and then returns without another branch.
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

/// Applies an instruction before the RDMSR, WRMSR or RDPMC to the values of ECX, EAX and EDX. Returns `None` for an
/// instruction that such a function does not have.
fn prepare(instruction: &Instruction, sources: &mut Sources) -> Option<()> {
    let index = |register: Register| match register {
        Register::RCX | Register::ECX => Some(0),
        Register::RAX | Register::EAX => Some(1),
        Register::RDX | Register::EDX => Some(2),
        _ => None,
    };
    let [to, from] = [instruction.op0_register(), instruction.op1_register()];
    match (instruction.code(), from) {
        (Code::Endbr64 | Code::Push_r64, _) => {}
        (Code::Mov_rm32_r32 | Code::Mov_r32_rm32, Register::EDI) => {
            sources[index(to)?] = Source::Argument(Register::RDI);
        }
        (Code::Mov_rm32_r32 | Code::Mov_r32_rm32, Register::ESI) => {
            sources[index(to)?] = Source::Argument(Register::RSI);
        }
        (Code::Mov_rm64_r64 | Code::Mov_r64_rm64, Register::RSI) => {
            sources[index(to)?] = Source::Whole(Register::RSI);
        }
        (Code::Shr_rm64_imm8, _) if instruction.immediate8() == 32 => {
            let source = &mut sources[index(to)?];
            let Source::Whole(register) = *source else { return None };
            *source = Source::Upper(register);
        }
        _ => return None,
    }
    Some(())
}

#[cfg(test)]
mod tests;
