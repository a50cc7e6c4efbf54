//! Where a kernel loads the id of the SBI PMU extension: `lui rd, 0x505`, and `addi rd, rd, -683` somewhere behind.

use super::Refusal;
use super::code::ID_LOW;
use super::decode::{Flow, decode};
use super::image::Text;
use super::proof::{Verdict, decide, entered};
use super::register::Register;

/// What LUI takes to get to the id of the SBI PMU extension.
pub const PMU_HIGH: u32 = 0x505;

/// How far behind the LUI an ADDI may be that is still its own.
const REACH: usize = 128;
/// How far behind a LUI that has no ADDI of its own there may be none at all.
const LOOK_AHEAD: usize = 4096;

/// A LUI that is the first half of an id.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// Where it is.
    pub at: usize,
    /// What it loads.
    pub register: Register,
    /// Where the second half is.
    second: usize,
}

/// Finds every load of an id whose LUI takes this.
pub fn find(text: &Text, high: u32) -> Result<Vec<Load>, Refusal> {
    let mut loads = Vec::new();
    let mut lone = Vec::new();
    for (at, word) in text.words().filter(|(_, word)| word & 0x7f == 0x37 && word >> 12 == high) {
        let register = Register::field(word, 7);
        match decide(text, at) {
            Verdict::Undecided if completions(text, at, register, REACH).next().is_some() => {
                return Err(Refusal::Undecided { at, what: "loads the id of the SBI PMU extension" });
            }
            Verdict::Inside | Verdict::Undecided => {}
            Verdict::Instruction => match follow(text, at, register)? {
                Some(second) => loads.push(Load { at, register, second }),
                None => lone.push((at, register)),
            },
        }
    }
    for load in &loads {
        if let Some(target) = entered(text, load.at + 2..load.second + 2, |_| true) {
            return Err(Refusal::Entered { at: load.at, target });
        }
    }
    // A LUI whose value goes elsewhere would be missed if some other code completed it.
    let is_lone = |at: usize| loads.iter().all(|load| load.second != at);
    for (at, register) in lone {
        if completions(text, at, register, LOOK_AHEAD).any(is_lone) {
            return Err(Refusal::Shared { at });
        }
    }
    Ok(loads)
}

/// Where the id that a LUI begins is completed, if it is: the LUI's value must be used there and nowhere else.
fn follow(text: &Text, lui: usize, register: Register) -> Result<Option<usize>, Refusal> {
    let mut at = lui + 4;
    while at < lui + REACH {
        let Some(instruction) = decode(text, at) else { return Ok(None) };
        if completes(text, at, register) {
            // The value must not stay behind in the register.
            return if instruction.writes == register {
                Ok(Some(at))
            } else {
                Err(Refusal::Shared { at: lui })
            };
        }
        let is_used = instruction.reads.contains(register);
        if is_used || instruction.writes == register || instruction.flow != Flow::Next {
            return Ok(None);
        }
        at += instruction.len;
    }
    Ok(None)
}

/// Every place behind a LUI where its register may be completed to an id.
fn completions(text: &Text, lui: usize, register: Register, reach: usize) -> impl Iterator<Item = usize> {
    text.places(lui + 4).take(reach / 2).filter(move |at| completes(text, *at, register))
}

/// Whether what is there is an ADDI or ADDIW that makes an id of a register's value.
fn completes(text: &Text, at: usize, register: Register) -> bool {
    text.word(at).is_some_and(|word| {
        matches!(word & 0x707f, 0x13 | 0x1b)
            && Register::field(word, 15) == register
            && word.cast_signed() >> 20 == ID_LOW
    })
}
