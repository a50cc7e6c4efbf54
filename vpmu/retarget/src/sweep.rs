//! A proof by decoding from one known boundary to another.

use std::ops::Range;

use super::decode::{Instruction, Mode, Target};
use super::starts::Start;
use super::{Proof, Section, Verdict};

/// How many starts in front of an occurrence are asked.
const ASKED: usize = 4;

impl Proof {
    /// How many starts of this kind have to agree.
    fn witnesses(self) -> usize {
        match self {
            // The table has more entries than it needs, so a second opinion is there for the asking.
            Self::Unwind => 2,
            Self::Alternative | Self::Function | Self::WholeSection | Self::Flow => 1,
        }
    }
}

/// What decoding from the starts in front of an occurrence to the next start behind it says.
pub fn decide(section: &Section, mode: Mode, starts: &[Start], at: u64) -> Verdict {
    let behind = starts.partition_point(|start| start.address <= at);
    let next = starts.get(behind).map_or(section.end(), |start| start.address);
    let asked = starts[..behind].iter().rev().take(ASKED);
    let usable: Vec<&Start> = asked.filter(|start| start.end.is_none_or(|end| at < end)).collect();
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
    // One that finds no instructions there speaks against the others.
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

/// Where instructions begin in a range that consists of nothing else, if it does: they lie end to end, and no branch among
/// them goes into the middle of another.
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
