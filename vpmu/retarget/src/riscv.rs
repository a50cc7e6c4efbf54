//! Changes a RISC-V Linux kernel so that its accesses to the PMU reach user space.
//!
//! KVM answers or refuses all of them itself: the calls of the SBI PMU extension, the reads of counters and the read of
//! `scountovf`. What it hands to user space are SBI calls of the vendor range. So all three become such calls:
//! - **Ids.** `lui rd, 0x505; addi rd, rd, -683` is the id of the SBI PMU extension. The LUI gets another number, and
//!   the id is [`EXTENSION`].
//! - **Counters.** They are read by a switch of `csrr a0, N; ret`, one pair for each. In the pairs of the counters, N is
//!   loaded and a jump leads to new code, which calls [`READ_COUNTER`]. The pair of `time` stays as it is.
//! - **Overflows.** `csrr rd, scountovf` becomes a jump to new code, which calls [`READ_OVERFLOWS`], puts the value into
//!   rd and nothing into any other register, and jumps back. The instruction is the default of an alternative: for the
//!   processors of two vendors (T-Head, Andes) the kernel puts another one over it. It does so without a look at what
//!   was there, so the jump is never moved; but such a processor must not be shown to the guest.
//!
//! The room for the new code is in the switch, which has pairs for 32-bit kernels. It knows no address, so the kernel
//! may run anywhere.
//!
//! A site is changed only if it is proven, by decoding what is around it: that an instruction begins there, that
//! nothing else uses the LUI's value, that no branch goes into the middle. If anything that looks like a site is not
//! proven, or if there is another one that cannot be changed, the kernel is refused and stays as it is: one that is
//! changed in part would count wrong.

mod code;
mod decode;
mod distance;
mod ids;
mod image;
mod proof;
mod register;
mod switch;

use std::fmt;

pub use self::register::Register;

use self::image::Text;
use self::proof::{Verdict, decide};
use self::switch::Switch;

/// The id of the extension that a changed kernel calls: the SBI PMU extension's, in the vendor range.
pub const EXTENSION: u64 = 0x0950_4d55;
/// Its function that reads a counter: the argument is the number of the counter's CSR.
pub const READ_COUNTER: u64 = 0x100;
/// Its function that reads which counters have overflowed, as `scountovf` says it.
pub const READ_OVERFLOWS: u64 = 0x101;

/// `csrr rd, scountovf`, and which of its bits do not depend on rd.
const READ_SCOUNTOVF: (u32, u32) = (0xda00_2073, 0xffff_f07f);

/// What was changed in a kernel.
#[derive(Debug, PartialEq, Eq)]
pub struct Retargeted {
    /// The changes, in the order of their offsets.
    pub changes: Vec<Change>,
}

impl Retargeted {
    /// Whether the kernel asks which counters have overflowed. One that does not, because it was built without
    /// Sscofpmf, can count, but not sample.
    pub fn samples(&self) -> bool {
        self.changes.iter().any(|change| matches!(change.kind, Kind::OverflowRead { .. }))
    }
}

/// A change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// Where it is in the image.
    pub offset: usize,
    /// What it is.
    pub kind: Kind,
}

/// What was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The id of an SBI call.
    ExtensionId {
        /// What it is loaded into.
        register: Register,
    },
    /// The switch that reads counters.
    CounterReads {
        /// How many counters it reads.
        counters: usize,
        /// Where the new code is.
        code: usize,
    },
    /// The read of the overflowed counters.
    OverflowRead {
        /// What they are read into.
        register: Register,
        /// Where the new code is.
        code: usize,
    },
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { offset, kind } = self;
        match kind {
            Kind::ExtensionId { register } => {
                write!(f, "{offset:#x}: the SBI PMU extension's id in {register} is now {EXTENSION:#x}")
            }
            Kind::CounterReads { counters, code } => {
                write!(f, "{offset:#x}: {counters} counters are read by the code at {code:#x}")
            }
            Kind::OverflowRead { register, code } => {
                write!(f, "{offset:#x}: the overflows are read into {register} by the code at {code:#x}")
            }
        }
    }
}

/// Why a kernel was not changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It has not the header of one.
    #[error("this is no uncompressed RISC-V kernel image")]
    NoImage,
    /// Nothing in it calls the SBI PMU extension.
    #[error("there is no SBI PMU driver in this kernel (CONFIG_RISCV_PMU_SBI)")]
    NoDriver,
    /// It calls ours.
    #[error("this kernel is retargeted already: it calls the extension {EXTENSION:#x} at {at:#x}")]
    Already {
        /// The first such call's offset.
        at: usize,
    },
    /// What looks like a site may be none.
    #[error("nothing proves that the kernel {what} at {at:#x}, although it looks so")]
    Undecided {
        /// The offset.
        at: usize,
        /// What it looks like.
        what: &'static str,
    },
    /// A LUI's value is used twice, or far away.
    #[error("the load at {at:#x} may be of the SBI PMU extension's id, but not only of that")]
    Shared {
        /// The LUI's offset.
        at: usize,
    },
    /// A branch goes to where a site would be changed.
    #[error("the kernel branches to {target:#x}, into the middle of what would be changed at {at:#x}")]
    Entered {
        /// The site's offset.
        at: usize,
        /// The branch's target.
        target: usize,
    },
    /// The switch is not there, or not as it is known.
    #[error("the kernel has no switch that reads counters (csr_read_num) of the known form")]
    NoSwitch,
    /// There are two.
    #[error("the kernel reads counters in two places, at {first:#x} and {second:#x}")]
    SecondSwitch {
        /// The first one's offset.
        first: usize,
        /// The second one's offset.
        second: usize,
    },
    /// The switch is in more than one piece.
    #[error("the kernel's switch at {at:#x} that reads counters does not read CSR {csr:#x}")]
    SwitchNotWhole {
        /// The switch's offset.
        at: usize,
        /// The CSR that it does not read.
        csr: u16,
    },
    /// The dead part of the switch is too small.
    #[error("the kernel's switch at {at:#x} has no room for the new code")]
    NoRoom {
        /// The switch's offset.
        at: usize,
    },
    /// A jump does not reach the new code, or the new code's does not get back.
    #[error("a jump from {at:#x} does not reach the new code at {code:#x}")]
    TooFar {
        /// The jump's offset.
        at: usize,
        /// The new code's offset.
        code: usize,
    },
    /// The stack would be lost.
    #[error("the kernel reads the overflows at {at:#x} into {register}, which the new code needs")]
    Register {
        /// The read's offset.
        at: usize,
        /// What it reads into.
        register: Register,
    },
}

/// Changes a kernel, all of it or nothing. The image is the flat one that begins with the header of
/// Documentation/arch/riscv/boot-image-header.rst; offsets are counted from there.
pub fn retarget(image: &mut [u8]) -> Result<Retargeted, Refusal> {
    let plan = Plan::new(&Text::of(image).ok_or(Refusal::NoImage)?)?;
    for Edit { at, bytes } in plan.edits {
        image[at..at + bytes.len()].copy_from_slice(&bytes);
    }
    Ok(Retargeted { changes: plan.changes })
}

/// New bytes for a place.
struct Edit {
    at: usize,
    bytes: Vec<u8>,
}

impl Edit {
    fn words(at: usize, words: &[u32]) -> Self {
        Self { at, bytes: words.iter().copied().flat_map(u32::to_le_bytes).collect() }
    }
}

/// What will be changed.
#[derive(Default)]
struct Plan {
    changes: Vec<Change>,
    edits: Vec<Edit>,
}

impl Plan {
    fn new(text: &Text) -> Result<Self, Refusal> {
        let mut plan = Self::default();
        plan.ids(text)?;
        let switch = Switch::find(text)?;
        let mut room = switch.room();
        let (code, edits) = switch.retarget(&mut room)?;
        plan.edits.extend(edits);
        let kind = Kind::CounterReads { counters: switch.counters(), code };
        plan.changes.push(Change { offset: switch.start, kind });
        plan.overflows(text, &mut room)?;
        plan.changes.sort_by_key(|change| change.offset);
        Ok(plan)
    }

    fn ids(&mut self, text: &Text) -> Result<(), Refusal> {
        let loads = ids::find(text, ids::PMU_HIGH)?;
        if loads.is_empty() {
            let ours = ids::find(text, code::ID_HIGH).unwrap_or_default();
            return Err(ours.first().map_or(Refusal::NoDriver, |load| Refusal::Already { at: load.at }));
        }
        for ids::Load { at, register, .. } in loads {
            self.edits.push(Edit::words(at, &[code::lui(register, code::ID_HIGH)]));
            self.changes.push(Change { offset: at, kind: Kind::ExtensionId { register } });
        }
        Ok(())
    }

    fn overflows(&mut self, text: &Text, room: &mut switch::Room) -> Result<(), Refusal> {
        let (pattern, mask) = READ_SCOUNTOVF;
        for (at, word) in text.words().filter(|(_, word)| word & mask == pattern) {
            match decide(text, at) {
                Verdict::Inside => continue,
                Verdict::Undecided => return Err(Refusal::Undecided { at, what: "reads scountovf" }),
                Verdict::Instruction => {}
            }
            let register = Register::field(word, 7);
            if register == Register::SP {
                return Err(Refusal::Register { at, register });
            }
            let code = room.take(code::READ_OVERFLOWS_LEN)?;
            let jump = code::jump(at, code).ok_or(Refusal::TooFar { at, code })?;
            let body = code::read_overflows(code, register, at).ok_or(Refusal::TooFar { at, code })?;
            self.edits.extend([Edit::words(at, &[jump]), Edit::words(code, &body)]);
            self.changes.push(Change { offset: at, kind: Kind::OverflowRead { register, code } });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
