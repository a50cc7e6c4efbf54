//! Proofs by control flow, which follow every path from the entry point.

use std::collections::BTreeMap;

use super::decode::{Instruction, Mode, Target};
use super::image::{Content, Section};
use super::site::{Proof, Verdict};
use super::work::Work;

/// Maximum length of an instruction.
const LONGEST: u64 = 15;

/// The instructions that direct jumps and calls lead to.
pub struct Flow(BTreeMap<(u64, Mode), Instruction>);

impl Flow {
    /// Follows the paths of code that starts at `entry` in 32-bit mode.
    pub fn follow(sections: &[Section], entry: u64, work: &Work) -> Self {
        let mut reached = BTreeMap::new();
        let mut ahead = vec![(entry, Mode::Bits32)];
        while let Some((address, mode)) = ahead.pop() {
            // The section has to be found.
            if !work.take(sections.len() as u64) {
                break;
            }
            let code = sections.iter().filter(|section| section.content == Content::Code);
            let Some(section) = code.clone().find(|section| section.contains(address)) else { continue };
            let mut next = address;
            while !reached.contains_key(&(next, mode)) {
                let Some(instruction) = Instruction::decode(section, mode, next, work) else { break };
                reached.insert((next, mode), instruction);
                match instruction.target {
                    Target::None => {}
                    Target::Near(target) => ahead.push((target, mode)),
                    // The mode is in the segment's descriptor, which is not known here.
                    Target::Far(target) => ahead.extend([(target, Mode::Bits32), (target, Mode::Bits64)]),
                }
                if !instruction.falls_through {
                    break;
                }
                next = instruction.end;
            }
        }
        Self(reached)
    }

    /// Decides what the occurrence at an address is, if it is code of this mode.
    pub fn decide(&self, mode: Mode, at: u64) -> Verdict {
        // An instruction that begins with the second byte contradicts one that ends with it.
        let near = self.0.range((at.saturating_sub(LONGEST), Mode::Bits32)..=(at + 1, Mode::Bits64));
        let covering = near.filter(|((_, of), _)| *of == mode).map(|(_, instruction)| instruction);
        covering
            .filter(|instruction| instruction.covers(at) || instruction.start == at + 1)
            .map(|instruction| Verdict::of(instruction, at, Proof::Flow))
            .fold(Verdict::Unreached, Verdict::and)
    }
}
