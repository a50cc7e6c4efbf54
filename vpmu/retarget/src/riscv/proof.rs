//! Whether an instruction begins at a place.
//!
//! RISC-V code is made of 16-bit parcels, and the first parcel of an instruction says whether there is a second. So
//! bytes that look like an instruction may be the second parcel of one and the first of the next. But decoding that
//! starts in the wrong place soon falls in step with the real instructions: wherever it starts, a few instructions
//! later it is right. What all starts in front of a place agree on is therefore how the compiler meant it. In data,
//! they agree on nothing: nearly all of them meet something that is no instruction.

use std::cmp::Ordering;
use std::ops::Range;

use super::decode::{Flow, Instruction, decode};
use super::image::Text;
use super::register::Register;

/// How far in front of a place the first start is.
const WINDOW: usize = 256;
/// How far in front of it the last one is: what is nearer may not be in step yet.
const NEAREST: usize = 64;
/// How many starts have to reach it.
const WITNESSES: usize = 24;
/// How far behind the place there have to be instructions.
const BEHIND: usize = 64;
/// What functions begin at multiples of if anything is filled up.
const ALIGNMENT: usize = 8;
/// How far conditional branches reach.
const BRANCH_REACH: usize = 4096;

/// What a place is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// An instruction begins there.
    Instruction,
    /// It is the second half of an instruction.
    Inside,
    /// Not known: there is no code in front of it, or not enough, or its starts disagree.
    Undecided,
}

/// What becomes of decoding that starts somewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// It reaches the place.
    Reaches,
    /// It passes over the place, with an instruction that begins in front and ends behind.
    PassesOver,
    /// It meets something that is no instruction.
    Dies,
}

/// Decides what a place is.
pub fn decide(text: &Text, place: usize) -> Verdict {
    let first = place.saturating_sub(WINDOW).max(text.start());
    let mut fates = [Fate::Dies; WINDOW / 2];
    for start in (first..place).step_by(2).rev() {
        let Some(instruction) = decode(text, start) else { continue };
        let next = behind_padding(text, start, instruction);
        fates[(start - first) / 2] = match next.cmp(&place) {
            Ordering::Less => fates[(next - first) / 2],
            Ordering::Equal => Fate::Reaches,
            Ordering::Greater => Fate::PassesOver,
        };
    }
    let usable = &fates[..(place.saturating_sub(NEAREST).saturating_sub(first)) / 2];
    let count = |wanted| usable.iter().filter(|fate| **fate == wanted).count();
    match (count(Fate::Reaches), count(Fate::PassesOver)) {
        (WITNESSES.., 0) if runs_on(text, place) => Verdict::Instruction,
        (0, WITNESSES..) => Verdict::Inside,
        _ => Verdict::Undecided,
    }
}

/// What comes next after an instruction in front of what comes next in the image: linkers fill up with zeros, which are
/// no instruction, what is between functions.
fn behind_padding(text: &Text, at: usize, instruction: Instruction) -> usize {
    let next = at + instruction.len;
    let is_nop = instruction.writes == Register::ZERO && instruction.reads == Register::ZERO.into();
    // Some functions never return.
    let is_call = instruction.flow != Flow::Next && instruction.writes == Register::RA;
    let aligned = next.next_multiple_of(ALIGNMENT);
    let is_padding = (next..aligned).step_by(2).all(|at| text.parcel(at) == Some(0));
    if is_padding && (instruction.flow.ends() || is_nop || is_call) { aligned } else { next }
}

/// Whether there are instructions from a place on.
fn runs_on(text: &Text, place: usize) -> bool {
    let mut at = place;
    while at < place + BEHIND {
        match decode(text, at) {
            None => return false,
            Some(instruction) if instruction.flow.ends() => return true,
            Some(instruction) => at = behind_padding(text, at, instruction),
        }
    }
    true
}

/// The first place in a range that code nearby branches to, of those that are asked about.
///
/// What compilers make jumps into the middle of nothing, so this looks where conditional branches can be.
pub fn entered(text: &Text, range: Range<usize>, asked: impl Fn(usize) -> bool) -> Option<usize> {
    let end = range.end.saturating_add(BRANCH_REACH);
    let mut at = range.start.saturating_sub(BRANCH_REACH + WINDOW).max(text.start());
    while at < end {
        // What is no instruction is stepped over, and the step is soon found again.
        let Some(instruction) = decode(text, at) else {
            if text.parcel(at).is_none() {
                break;
            }
            at += 2;
            continue;
        };
        let distance = instruction.flow.distance().and_then(|distance| isize::try_from(distance).ok());
        let target = distance.and_then(|distance| at.checked_add_signed(distance));
        if let Some(target) = target.filter(|target| range.contains(target) && asked(*target)) {
            return Some(target);
        }
        at += instruction.len;
    }
    None
}
