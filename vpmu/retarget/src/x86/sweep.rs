//! Proofs by decoding from one known boundary to the next.

use std::ops::Range;

use super::decode::{Instruction, Mode, Target};
use super::image::Section;
use super::site::{Proof, Verdict};
use super::start::Start;
use super::work::Work;

/// Maximum number of starts before an occurrence from which the code is decoded.
const MAX_STARTS: usize = 4;

/// Number of instructions after an occurrence that have to decode, if the rest of the function does not.
const BEHIND: usize = 8;

impl Proof {
    /// Returns how many starts of this kind must agree.
    fn witnesses(self) -> usize {
        match self {
            // Functions have several entries in the unwind table, so a second start is nearly always there.
            Self::Unwind => 2,
            Self::Alternative | Self::Function | Self::PartOfFunction | Self::WholeSection | Self::Flow => 1,
        }
    }
}

/// Decides what the occurrence at an address is, by decoding from the starts before it to the next start after it.
pub fn decide(section: &Section, mode: Mode, starts: &[Start], at: u64, work: &Work) -> Verdict {
    let behind = starts.partition_point(|start| start.address <= at);
    let next = starts.get(behind).map_or(section.end(), |start| start.address);
    let candidates = starts[..behind].iter().rev().take(MAX_STARTS);
    let usable: Vec<&Start> = candidates.filter(|start| start.end.is_none_or(|end| at < end)).collect();
    let Some(nearest) = usable.first() else { return Verdict::Unreached };
    let found: Option<Vec<Instruction>> = usable
        .iter()
        .map(|start| {
            let end = start.end.map_or(next, |end| end.min(next));
            covering(section, mode, start.address..end, at, work)
        })
        .collect();
    // A start from which the code cannot be decoded contradicts the others.
    let Some(found) = found else { return Verdict::NotCode };
    match found.first() {
        Some(first) if found.iter().any(|other| other != first) => Verdict::Contradiction,
        Some(first) if found.len() >= nearest.kind.witnesses() => Verdict::of(first, at, nearest.kind),
        _ => Verdict::Unreached,
    }
}

/// Decides what the occurrence at an address is, if the function around it does not decode to its end: by decoding from
/// the function's first byte to [`BEHIND`] instructions after the occurrence, or to one that never continues after it.
pub fn decide_nearby(section: &Section, mode: Mode, starts: &[Start], at: u64, work: &Work) -> Verdict {
    let behind = starts.partition_point(|start| start.address <= at);
    let Some(start) = behind.checked_sub(1).map(|index| starts[index]) else { return Verdict::Unreached };
    let Some(end) = start.end.filter(|end| at < *end) else { return Verdict::Unreached };
    let after =
        Instruction::stream(section, mode, start.address, work).filter(|instruction| instruction.start > at);
    let last = after.enumerate().find(|(index, last)| index + 1 == BEHIND || !last.falls_through);
    let last = last.map(|(_, last)| last.end).filter(|last| *last <= end);
    match last.and_then(|last| covering(section, mode, start.address..last, at, work)) {
        Some(found) => Verdict::of(&found, at, Proof::PartOfFunction),
        None => Verdict::NotCode,
    }
}

/// Returns the instruction at an address of a range. Returns `None` if [`boundaries`] does.
fn covering(section: &Section, mode: Mode, range: Range<u64>, at: u64, work: &Work) -> Option<Instruction> {
    let boundaries = boundaries(section, mode, range, work)?;
    let index = boundaries.partition_point(|boundary| *boundary <= at).checked_sub(1)?;
    Instruction::decode(section, mode, boundaries[index], work)
}

/// Returns the addresses of the instructions in a range. Returns `None` unless the range consists of consecutive
/// instructions only, and no branch among them leads into the middle of another.
pub fn boundaries(section: &Section, mode: Mode, range: Range<u64>, work: &Work) -> Option<Vec<u64>> {
    let mut boundaries = Vec::new();
    let mut targets = Vec::new();
    let mut end = range.start;
    for instruction in Instruction::stream(section, mode, range.start, work) {
        if end >= range.end {
            break;
        }
        boundaries.push(instruction.start);
        match instruction.target {
            Target::Near(target) if range.contains(&target) => targets.push(target),
            _ => {}
        }
        end = instruction.end;
    }
    let fits = end == range.end && targets.iter().all(|target| boundaries.binary_search(target).is_ok());
    fits.then_some(boundaries)
}
