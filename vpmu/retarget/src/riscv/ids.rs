//! Finds where a kernel loads the id of the SBI PMU extension: `lui rd, 0x505`, followed by `addi rd, rd, -683`,
//! perhaps with other instructions between.

use std::collections::BTreeSet;

use super::code::ID_LOW;
use super::decode::{Flow, decode};
use super::image::Text;
use super::proof::{Verdict, decide, entered};
use super::register::Register;
use super::{MAX_SITES, Refusal};

/// Immediate of the LUI that loads the id of the SBI PMU extension.
pub const PMU_HIGH: u32 = 0x505;

/// Maximum distance from the LUI to its ADDI.
const REACH: usize = 128;
/// Distance after a LUI without an ADDI in which no other ADDI may complete its value to an id.
const LOOK_AHEAD: usize = 4096;

/// Two instructions that load an id.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// Offset of the LUI.
    pub at: usize,
    /// The register that is loaded.
    pub register: Register,
    /// Offset of the ADDI.
    pub second: usize,
}

/// Finds all loads of an id whose LUI has the immediate `high`.
pub fn find(text: &Text, high: u32) -> Result<Vec<Load>, Refusal> {
    let mut loads = Vec::new();
    let mut lone = Vec::new();
    let candidates = text.words().filter(|(_, word)| word & 0x7f == 0x37 && word >> 12 == high);
    for (number, (at, word)) in candidates.enumerate() {
        if number == MAX_SITES {
            return Err(Refusal::TooMany { limit: MAX_SITES });
        }
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
    // The value of a LUI may flow elsewhere, and code there may complete it to an id. Such a load would be missed.
    let seconds: BTreeSet<usize> = loads.iter().map(|load| load.second).collect();
    let is_lone = |at: usize| !seconds.contains(&at);
    for (at, register) in lone {
        if completions(text, at, register, LOOK_AHEAD).any(is_lone) {
            return Err(Refusal::Shared { at });
        }
    }
    Ok(loads)
}

/// Returns the offset of the ADDI that completes the value of a LUI to an id, if there is one. Nothing else may use the
/// value.
fn follow(text: &Text, lui: usize, register: Register) -> Result<Option<usize>, Refusal> {
    let mut at = lui + 4;
    while at < lui + REACH {
        let Some(instruction) = decode(text, at) else { return Ok(None) };
        if completes(text, at, register) {
            // With another destination register, the value of the LUI would remain in its register.
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

/// Returns all offsets within `reach` of a LUI at which an ADDI may complete its register to an id.
fn completions(text: &Text, lui: usize, register: Register, reach: usize) -> impl Iterator<Item = usize> {
    text.places(lui + 4).take(reach / 2).filter(move |at| completes(text, *at, register))
}

/// Returns whether the bytes at an offset are an ADDI or ADDIW that completes a register's value to an id.
fn completes(text: &Text, at: usize, register: Register) -> bool {
    text.word(at).is_some_and(|word| {
        matches!(word & 0x707f, 0x13 | 0x1b)
            && Register::field(word, 15) == register
            && word.cast_signed() >> 20 == ID_LOW
    })
}
