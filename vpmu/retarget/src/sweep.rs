//! Proofs by decoding from one known boundary to the next.

use std::ops::Range;

use super::decode::{Instruction, Mode, Target};
use super::start::Start;
use super::{Proof, Section, Verdict};

/// Maximum number of starts before an occurrence from which the code is decoded.
const MOST_STARTS: usize = 4;

impl Proof {
    /// Returns how many starts of this kind must agree.
    fn witnesses(self) -> usize {
        match self {
            // Functions have several entries in the unwind table, so a second start is nearly always there.
            Self::Unwind => 2,
            Self::Alternative | Self::Function | Self::WholeSection | Self::Flow => 1,
        }
    }
}

/// Decides what the occurrence at an address is, by decoding from the starts before it to the next start after it.
pub fn decide(section: &Section, mode: Mode, starts: &[Start], at: u64) -> Verdict {
    let behind = starts.partition_point(|start| start.address <= at);
    let next = starts.get(behind).map_or(section.end(), |start| start.address);
    let candidates = starts[..behind].iter().rev().take(MOST_STARTS);
    let usable: Vec<&Start> = candidates.filter(|start| start.end.is_none_or(|end| at < end)).collect();
    let Some(nearest) = usable.first() else { return Verdict::Unreached };
    let found: Option<Vec<Instruction>> = usable
        .iter()
        .map(|start| {
            let end = start.end.map_or(next, |end| end.min(next));
            let boundaries = boundaries(section, mode, start.address..end)?;
            let covering = boundaries.partition_point(|boundary| *boundary <= at).checked_sub(1)?;
            Instruction::decode(section, mode, boundaries[covering])
        })
        .collect();
    // A start from which the code cannot be decoded contradicts the others.
    let Some(found) = found else { return Verdict::Contradiction };
    match found.first() {
        Some(first) if found.iter().any(|other| other != first) => Verdict::Contradiction,
        Some(first) if found.len() >= nearest.kind.witnesses() => {
            if first.is_rdpmc && first.end == at + 2 {
                Verdict::Rdpmc { start: first.start, proof: nearest.kind }
            } else {
                Verdict::Other
            }
        }
        _ => Verdict::Unreached,
    }
}

/// Returns the addresses of the instructions in a range. Returns `None` unless the range consists of consecutive
/// instructions only, and no branch among them leads into the middle of another.
pub fn boundaries(section: &Section, mode: Mode, range: Range<u64>) -> Option<Vec<u64>> {
    let mut boundaries = Vec::new();
    let mut targets = Vec::new();
    let mut end = range.start;
    for instruction in Instruction::stream(section, mode, range.start) {
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
