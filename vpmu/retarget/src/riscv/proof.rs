//! Decides whether an instruction begins at an offset.
//!
//! RISC-V code consists of 16-bit parcels, and the first parcel of an instruction says whether there is a second one.
//! So bytes that look like an instruction may be the second parcel of one instruction and the first parcel of the next.
//! But decoding that starts at the wrong parcel soon synchronizes with the real instructions: whatever the start, it is
//! right a few instructions later. If decoding from all starts before an offset agrees, the result is what the compiler
//! meant. In data it does not agree, because nearly all starts lead to something that is no instruction.

use std::cmp::Ordering;
use std::ops::Range;

use super::decode::{Flow, Instruction, decode};
use super::image::Text;
use super::register::Register;

/// Distance from the first start to the offset in question.
const WINDOW: usize = 256;
/// Distance from the last start to the offset: decoding from a nearer start may not have synchronized yet.
const NEAREST: usize = 64;
/// Number of starts that must lead to the offset.
const WITNESSES: usize = 24;
/// Number of bytes after the offset that must be instructions.
const BEHIND: usize = 64;
/// Alignment of functions, for which linkers insert padding.
const ALIGNMENT: usize = 8;
/// Greatest distance of a conditional branch.
const BRANCH_REACH: usize = 4096;

/// What is at an offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// An instruction begins there.
    Instruction,
    /// The second parcel of an instruction.
    Inside,
    /// Unknown: there is no code before the offset, or too little, or decoding from the starts disagrees.
    Undecided,
}

/// Result of decoding from a start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trace {
    /// An instruction begins at the offset.
    Reaches,
    /// An instruction begins before the offset and ends after it.
    PassesOver,
    /// Something on the way is no instruction.
    Fails,
}

/// Decides what is at the offset `place`.
pub fn decide(text: &Text, place: usize) -> Verdict {
    let first = place.saturating_sub(WINDOW).max(text.start());
    let mut traces = [Trace::Fails; WINDOW / 2];
    for start in (first..place).step_by(2).rev() {
        let Some(instruction) = decode(text, start) else { continue };
        let next = skip_padding(text, start, instruction);
        traces[(start - first) / 2] = match next.cmp(&place) {
            Ordering::Less => traces[(next - first) / 2],
            Ordering::Equal => Trace::Reaches,
            Ordering::Greater => Trace::PassesOver,
        };
    }
    let usable = &traces[..(place.saturating_sub(NEAREST).saturating_sub(first)) / 2];
    let count = |wanted| usable.iter().filter(|trace| **trace == wanted).count();
    match (count(Trace::Reaches), count(Trace::PassesOver)) {
        (WITNESSES.., 0) if runs_on(text, place) => Verdict::Instruction,
        (0, WITNESSES..) => Verdict::Inside,
        _ => Verdict::Undecided,
    }
}

/// Returns the offset after an instruction, and after the padding that may follow it: linkers insert zeros between
/// functions, which are no instruction.
fn skip_padding(text: &Text, at: usize, instruction: Instruction) -> usize {
    let next = at + instruction.len;
    let is_nop = instruction.writes == Register::ZERO && instruction.reads == Register::ZERO.into();
    // A call of a function that never returns may be the last instruction of a function.
    let is_call = instruction.flow != Flow::Next && instruction.writes == Register::RA;
    let aligned = next.next_multiple_of(ALIGNMENT);
    let is_padding = (next..aligned).step_by(2).all(|at| text.parcel(at) == Some(0));
    if is_padding && (instruction.flow.ends() || is_nop || is_call) { aligned } else { next }
}

/// Returns whether there are instructions from an offset on, up to [`BEHIND`] bytes or the end of the function.
fn runs_on(text: &Text, place: usize) -> bool {
    let mut at = place;
    while at < place + BEHIND {
        match decode(text, at) {
            None => return false,
            Some(instruction) if instruction.flow.ends() => return true,
            Some(instruction) => at = skip_padding(text, at, instruction),
        }
    }
    true
}

/// Returns the target of a branch into a range, if there is one in the code around it. Only targets for which `counts`
/// returns true are considered.
///
/// Compilers do not jump into the middle of other code, so the search is limited to the reach of conditional branches.
pub fn entered(text: &Text, range: Range<usize>, counts: impl Fn(usize) -> bool) -> Option<usize> {
    let end = range.end.saturating_add(BRANCH_REACH);
    let mut at = range.start.saturating_sub(BRANCH_REACH + WINDOW).max(text.start());
    while at < end {
        // Skips a parcel that is no instruction. Decoding soon synchronizes again.
        let Some(instruction) = decode(text, at) else {
            if text.parcel(at).is_none() {
                break;
            }
            at += 2;
            continue;
        };
        let distance = instruction.flow.distance().and_then(|distance| isize::try_from(distance).ok());
        let target = distance.and_then(|distance| at.checked_add_signed(distance));
        if let Some(target) = target.filter(|target| range.contains(target) && counts(*target)) {
            return Some(target);
        }
        at += instruction.len;
    }
    None
}
