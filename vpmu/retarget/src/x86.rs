//! How x86-64 kernels access their counters.
//! - RDPMC (`0F 33`) never exits to user space. RDMSR (`0F 32`) has the same operands and can be made to exit, so one
//!   bit of each RDPMC has to be changed. [`find`] finds the RDPMC instructions of an image.
//! - [`functions`] and [`stub`] let a Linux kernel access its PMU's MSRs on a page that it shares with the VMM while
//!   all counters are frozen, without leaving the guest.
//! - [`rdpmc_in_programs`] lets programs in user mode execute RDPMC, by code in front of the kernel's handler of the
//!   fault, which [`exceptions`] finds.
//!
//! # Proofs
//! The bytes `0F 33` also occur inside of other instructions and in data. Changing them there would damage the guest
//! without a trace. So each occurrence is decided by a **proof**. An occurrence without a proof is reported as
//! undecided.
//!
//! A proof decodes instructions from an address at which an instruction is known to begin ([`Proof`] lists where this
//! knowledge comes from):
//! - **Between two boundaries.** The instructions from a known start must be valid and lie end to end up to the next
//!   known start or the end of the function, and no branch among them may lead into the middle of one of them. All
//!   usable starts before the occurrence must agree. How many of them are needed depends on where they are known from.
//! - **By control flow**, for images without information about functions. The proof follows every path of direct jumps
//!   and calls from the entry point. It assumes that calls return.
//!
//! # Example
//! ```
//! use vpmu_retarget::x86::{Content, Image, Kind, Section, Site, Symbol, find};
//!
//! // mov ecx, edi; rdpmc; ret
//! let mut text = [0x89, 0xf9, 0x0f, 0x33, 0xc3];
//! let address = 0xffff_ffff_8100_0000;
//! let section = Section::new(".text", address, &text, Content::Code).expect("not at the end of the address space");
//! let function = Symbol { name: "native_read_pmc", address, len: 5, content: Content::Code };
//! let image = Image { sections: vec![section], symbols: vec![function], kind: Kind::Linux };
//!
//! let findings = find(&image);
//! assert!(findings.undecided.is_empty());
//! for site in findings.sites {
//!     println!("RDPMC at {site}");
//!     text[(site.byte - address) as usize] = Site::AFTER;
//! }
//! assert_eq!(text, [0x89, 0xf9, 0x0f, 0x32, 0xc3], "RDMSR");
//! ```

mod decode;
pub mod exceptions;
pub mod filling;
mod flow;
pub mod functions;
mod image;
pub mod rdpmc_in_programs;
mod site;
mod start;
mod starts;
pub mod stub;
mod sweep;
mod words;
mod work;

use std::collections::BTreeSet;

use self::decode::Mode;
use self::flow::Flow;
use self::site::Verdict;
use self::start::Start;
use self::starts::starts;
use self::work::Work;

pub use self::image::{Content, Image, Kind, Section, Symbol};
pub use self::site::{Findings, Proof, Site};

/// A proof by decoding, in one mode, from known starts.
type Sweep = fn(&Section, Mode, &[Start], u64, &Work) -> Verdict;

/// Maximum number of steps of [`find`]: enough to decode 512 MiB of instructions of two bytes once.
pub const MAX_STEPS: u64 = 1 << 28;

/// Finds all RDPMC instructions in an image's code. Does at most [`MAX_STEPS`] steps of work: occurrences for which
/// none are left are undecided.
pub fn find(image: &Image) -> Findings {
    find_in(image, MAX_STEPS)
}

/// As [`find`], in at most this number of steps.
pub fn find_in(image: &Image, steps: u64) -> Findings {
    let work = &Work::new(steps);
    let flow = match image.kind {
        Kind::Linux => None,
        // Without an occurrence there is nothing to decide.
        Kind::BareMetal { .. } if image.code().all(|section| section.occurrences().next().is_none()) => None,
        Kind::BareMetal { entry } => Some(Flow::follow(&image.sections, entry, work)),
    };
    let mut findings = Findings::default();
    let mut seen = BTreeSet::new();
    for section in image.code() {
        // The search itself, and the tables that are read for each section with an occurrence. Sections may overlap.
        let read = if section.occurrences().next().is_some() { image.sizes() } else { 0 };
        work.take(section.bytes.len() as u64 / SEARCHED_PER_STEP + read);
        let mut starts_of_section = None;
        for at in section.occurrences() {
            let verdict = (!work.is_used_up()).then(|| {
                let starts = starts_of_section.get_or_insert_with(|| {
                    let occurrences: Vec<u64> = section.occurrences().collect();
                    starts(image, section, &occurrences, work)
                });
                image.decide(section, starts, flow.as_ref(), at, work)
            });
            match verdict.filter(|_| !work.is_used_up()) {
                None => {
                    findings.undecided.push(at);
                    // Where the others are does not matter: one is enough to refuse a kernel.
                    break;
                }
                Some(Verdict::Rdpmc { start, proof }) if seen.insert(start) => findings.sites.push(Site {
                    address: start,
                    byte: at + 1,
                    function: image.function_at(start).map(str::to_owned),
                    proof,
                }),
                Some(Verdict::Rdpmc { .. } | Verdict::Other) => {}
                Some(Verdict::Unreached | Verdict::NotCode | Verdict::Contradiction) => {
                    findings.undecided.push(at);
                }
            }
        }
    }
    findings
}

/// Number of symbols that are looked at in the time of a step.
const SYMBOLS_PER_STEP: u64 = 8;
/// Number of bytes that are searched for RDPMC in the time of a step.
const SEARCHED_PER_STEP: u64 = 64;

impl Image<'_> {
    /// Decides what the occurrence at an address is.
    fn decide(
        &self,
        section: &Section,
        starts: &[Start],
        flow: Option<&Flow>,
        at: u64,
        work: &Work,
    ) -> Verdict {
        // For the search of the symbols, here and for the function's name.
        work.take(self.symbols.len() as u64 / SYMBOLS_PER_STEP);
        if self.symbols.iter().any(|symbol| symbol.content == Content::Data && symbol.contains(at)) {
            return Verdict::Other;
        }
        let sweep = |decide: Sweep| -> Vec<(Mode, Verdict)> {
            self.modes().iter().map(|mode| (*mode, decide(section, *mode, starts, at, work))).collect()
        };
        let mut swept = sweep(sweep::decide);
        if let Some(flow) = flow {
            // A function that decodes in one mode only is code of that mode.
            if swept.iter().all(|(_, verdict)| *verdict == Verdict::NotCode) {
                swept = sweep(sweep::decide_nearby);
            }
            if swept.iter().any(|(_, verdict)| *verdict != Verdict::NotCode) {
                swept.retain(|(_, verdict)| *verdict != Verdict::NotCode);
            }
            let modes: Vec<Mode> = swept.iter().map(|(mode, _)| *mode).collect();
            swept.extend(modes.into_iter().map(|mode| (mode, flow.decide(mode, at))));
        }
        swept.into_iter().map(|(_, verdict)| verdict).fold(Verdict::Unreached, Verdict::and)
    }

    /// Returns the number of symbols and of tables' entries, as steps.
    fn sizes(&self) -> u64 {
        let tables = self.sections.iter().map(|section| section.bytes.len() as u64);
        self.symbols.len() as u64 + tables.fold(0, u64::saturating_add) / SEARCHED_PER_STEP
    }

    /// Returns the modes in which the code may run. RDPMC has the same encoding in all of them.
    fn modes(&self) -> &'static [Mode] {
        match self.kind {
            Kind::Linux => &[Mode::Bits64],
            Kind::BareMetal { .. } => &[Mode::Bits32, Mode::Bits64],
        }
    }

    fn function_at(&self, address: u64) -> Option<&str> {
        let is_it = |symbol: &&Symbol| symbol.content == Content::Code && symbol.contains(address);
        self.symbols.iter().find(is_it).map(|symbol| symbol.name)
    }
}

#[cfg(test)]
mod tests;
