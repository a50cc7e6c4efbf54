//! A proof by following every path from an entry point.

use std::collections::BTreeMap;

use super::decode::{Instruction, Mode, Target};
use super::{Content, Proof, Section, Verdict};

/// The longest instruction that there can be.
const LONGEST: u64 = 15;

/// Every instruction that direct jumps and calls lead to.
pub struct Flow(BTreeMap<(u64, Mode), Instruction>);

impl Flow {
    /// Follows the paths of code that starts in 32-bit mode.
    pub fn follow(sections: &[Section], entry: u64) -> Self {
        let mut reached = BTreeMap::new();
        let mut ahead = vec![(entry, Mode::Bits32)];
        while let Some((address, mode)) = ahead.pop() {
            let code = sections.iter().filter(|section| section.content == Content::Code);
            let Some(section) = code.clone().find(|section| section.contains(address)) else { continue };
            let mut next = address;
            while !reached.contains_key(&(next, mode)) {
                let Some(instruction) = Instruction::decode(section, mode, next) else { break };
                reached.insert((next, mode), instruction);
                match instruction.target {
                    Target::None => {}
                    Target::Near(target) => ahead.push((target, mode)),
                    // What mode that segment has is in a descriptor, and only the running code knows which.
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

    /// What the paths say of the two bytes at an address.
    pub fn decide(&self, at: u64) -> Verdict {
        // An instruction that begins with the second byte speaks against one that ends with it.
        let near = self.0.range((at.saturating_sub(LONGEST), Mode::Bits32)..=(at + 1, Mode::Bits64));
        let covering = near.map(|(_, instruction)| instruction);
        covering
            .filter(|instruction| instruction.covers(at) || instruction.start == at + 1)
            .map(|instruction| {
                if instruction.is_rdpmc && instruction.end == at + 2 {
                    Verdict::Rdpmc { start: instruction.start, proof: Proof::Flow }
                } else {
                    Verdict::Other
                }
            })
            .fold(Verdict::Unreached, Verdict::and)
    }
}
