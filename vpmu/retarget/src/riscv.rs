//! Retargets a RISC-V Linux kernel, so that its accesses to the PMU reach the VMM.
//!
//! KVM handles all of these accesses itself: calls of the SBI PMU extension, reads of the counter CSRs and the read of
//! `scountovf`. It hands SBI calls of the vendor range to user space. So all accesses are changed into such calls:
//! - **Extension ids.** `lui rd, 0x505; addi rd, rd, -683` loads the id of the SBI PMU extension. The LUI gets another
//!   immediate, so that the id becomes [`EXTENSION`].
//! - **Counters.** The kernel reads them in a switch of pairs `csrr a0, N; ret`, one for each counter. In these pairs
//!   the CSRR becomes a load of N, and the return becomes a jump to new code, which calls [`READ_COUNTER`]. The pair of
//!   `time` is kept.
//! - **Overflows.** `csrr rd, scountovf` becomes a jump to new code, which calls [`READ_OVERFLOWS`], puts the value
//!   into rd, keeps all other registers, and jumps back. The instruction is the default of an alternative. On
//!   processors of two vendors (T-Head, Andes) the kernel overwrites it with another instruction, without checking what
//!   it overwrites. A VMM must not show such a processor to the guest.
//!
//! The new code takes the place of pairs in the switch that only 32-bit kernels use. It is position-independent, so the
//! kernel may run at any address.
//!
//! Most of the calls need no exit, if the kernel shares a page with the VMM ([`vpmu::sbi_page`]). Where a kernel has
//! the room for it, the new code for that is added to the unused end of its text, and the kernel's calls, the switch
//! and the read of `scountovf` use that code.
//!
//! A site is changed only if decoding the code around it proves that an instruction begins there, that nothing else
//! uses the value of the LUI, and that no branch leads into the middle of the change. If anything that looks like a
//! site is not proven, or a site cannot be changed, the whole kernel is refused and left as it is. A kernel that was
//! changed in part would count wrong.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut image = std::fs::read("arch/riscv/boot/Image")?;
//! let retargeted = vpmu_retarget::riscv::retarget(&mut image, 1)?;
//! for change in &retargeted.changes {
//!     println!("{change}");
//! }
//! # Ok(())
//! # }
//! ```

mod assembler;
mod code;
mod decode;
mod distance;
mod encode;
mod ids;
mod image;
mod page;
mod proof;
mod register;
mod stub;
mod switch;

use std::fmt;

pub use self::register::Register;

use self::image::Text;
use self::proof::{Verdict, decide};
use self::stub::Stub;
use self::switch::Switch;

/// The SBI extension that a retargeted kernel calls: the id of the SBI PMU extension, moved to the vendor range. Its
/// functions are those of the SBI PMU extension, [`READ_COUNTER`] and [`READ_OVERFLOWS`].
pub const EXTENSION: u64 = 0x0950_4d55;
/// Function of [`EXTENSION`] that reads a counter. The argument is the number of the counter's CSR.
pub const READ_COUNTER: u64 = 0x100;
/// Function of [`EXTENSION`] that reads `scountovf`.
pub const READ_OVERFLOWS: u64 = 0x101;

/// `csrr rd, scountovf`, and the mask of the bits that do not depend on rd.
const READ_SCOUNTOVF: (u32, u32) = (0xda00_2073, 0xffff_f07f);

/// Maximum number of instructions of one kind that look like sites. Each is looked at together with the kilobytes
/// around it, which an image of nothing else would make hours of work. Kernels have dozens at most.
const MAX_SITES: usize = 4096;

/// The changes made to a kernel.
#[derive(Debug, PartialEq, Eq)]
pub struct Retargeted {
    /// The changes, in ascending order of their offsets.
    pub changes: Vec<Change>,
    /// Offset of the pages that the kernel shares with the VMM, one for each CPU. They are behind the image, in memory
    /// that the kernel reserves for itself. `None` if the kernel has no room for the code that uses them.
    pub pages: Option<u64>,
}

impl Retargeted {
    /// Returns whether the kernel reads `scountovf`. A kernel that was built without Sscofpmf does not; it can count
    /// but not sample.
    pub fn samples(&self) -> bool {
        self.changes.iter().any(|change| matches!(change.kind, Kind::OverflowRead { .. }))
    }
}

/// A change made to a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// Offset in the image.
    pub offset: usize,
    /// What was changed.
    pub kind: Kind,
}

/// Kind of a [`Change`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The extension id of an SBI call was replaced by [`EXTENSION`].
    ExtensionId {
        /// The register that the id is loaded into.
        register: Register,
    },
    /// The switch that reads counter CSRs now calls [`READ_COUNTER`].
    CounterReads {
        /// Number of counters that the switch reads.
        counters: usize,
        /// Offset of the new code.
        code: usize,
    },
    /// The kernel's calls go through new code, which makes them on a shared page if they need no exit.
    Stub {
        /// Number of calls.
        calls: usize,
    },
    /// A read of `scountovf` now calls [`READ_OVERFLOWS`].
    OverflowRead {
        /// The register that `scountovf` is read into.
        register: Register,
        /// Offset of the new code.
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
            Kind::Stub { calls } => {
                write!(
                    f,
                    "{offset:#x}: {calls} of the calls go through the code here, which uses a shared page"
                )
            }
            Kind::OverflowRead { register, code } => {
                write!(f, "{offset:#x}: the overflows are read into {register} by the code at {code:#x}")
            }
        }
    }
}

/// Why a kernel was not changed. All offsets are in the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The image does not have the header of a RISC-V kernel image.
    #[error("this is no uncompressed RISC-V kernel image")]
    NoImage,
    /// The kernel does not call the SBI PMU extension.
    #[error("there is no SBI PMU driver in this kernel (CONFIG_RISCV_PMU_SBI)")]
    NoDriver,
    /// The kernel was retargeted before.
    #[error("this kernel is retargeted already: it calls the extension {EXTENSION:#x} at {at:#x}")]
    Already {
        /// Offset of the first call.
        at: usize,
    },
    /// More instructions look like sites than any kernel has.
    #[error("this is no kernel: more than {limit} of its instructions look like accesses to the PMU")]
    TooMany {
        /// The largest number that is looked at.
        limit: usize,
    },
    /// The bytes of a site occur where nothing proves that they are an instruction.
    #[error("nothing proves that the kernel {what} at {at:#x}, although it looks so")]
    Undecided {
        /// Offset of the bytes.
        at: usize,
        /// What they would do, as the predicate of a sentence.
        what: &'static str,
    },
    /// The value of a LUI that belongs to an extension id may also be used otherwise.
    #[error(
        "the value loaded at {at:#x} may become the SBI PMU extension's id, but it is also used otherwise, or far away"
    )]
    Shared {
        /// Offset of the LUI.
        at: usize,
    },
    /// A branch leads into the middle of a site.
    #[error("the kernel branches to {target:#x}, into the middle of what would be changed at {at:#x}")]
    Entered {
        /// Offset of the site.
        at: usize,
        /// Offset of the branch's target.
        target: usize,
    },
    /// The switch that reads counters was not found.
    #[error("the kernel has no switch that reads counters (csr_read_num) of the known form")]
    NoSwitch,
    /// There is more than one switch that reads counters.
    #[error("the kernel reads counters in two places, at {first:#x} and {second:#x}")]
    SecondSwitch {
        /// Offset of the first switch.
        first: usize,
        /// Offset of the second switch.
        second: usize,
    },
    /// The switch lacks a counter, so that it may have further parts elsewhere.
    #[error("the kernel's switch at {at:#x} that reads counters does not read CSR {csr:#x}")]
    SwitchNotWhole {
        /// Offset of the switch.
        at: usize,
        /// The CSR that it does not read.
        csr: u16,
    },
    /// The switch has too few unused pairs for the new code.
    #[error("the kernel's switch at {at:#x} has no room for the new code")]
    NoRoom {
        /// Offset of the switch.
        at: usize,
    },
    /// A jump between a site and the new code would be too long.
    #[error("a jump from {at:#x} does not reach the new code at {code:#x}")]
    TooFar {
        /// Offset of the jump.
        at: usize,
        /// Offset of the new code.
        code: usize,
    },
    /// The kernel reads `scountovf` into the stack pointer, which the new code needs.
    #[error("the kernel reads the overflows at {at:#x} into {register}, which the new code needs")]
    Register {
        /// Offset of the read.
        at: usize,
        /// The register that it reads into.
        register: Register,
    },
}

/// Retargets a kernel, or leaves it as it is and says why. The image is the flat one that begins with the header of
/// Documentation/arch/riscv/boot-image-header.rst. Offsets are relative to its beginning. The guest has `cpus` CPUs.
pub fn retarget(image: &mut [u8], cpus: u8) -> Result<Retargeted, Refusal> {
    let plan = Plan::new(&Text::of(image).ok_or(Refusal::NoImage)?, image::memory(image), cpus)?;
    for Edit { at, bytes } in plan.edits {
        image[at..at + bytes.len()].copy_from_slice(&bytes);
    }
    Ok(Retargeted { changes: plan.changes, pages: plan.pages })
}

/// New bytes for an offset in the image.
struct Edit {
    at: usize,
    bytes: Vec<u8>,
}

impl Edit {
    fn words(at: usize, words: &[u32]) -> Self {
        Self { at, bytes: words.iter().copied().flat_map(u32::to_le_bytes).collect() }
    }
}

/// The changes to be made.
#[derive(Default)]
struct Plan {
    changes: Vec<Change>,
    edits: Vec<Edit>,
    pages: Option<u64>,
}

impl Plan {
    fn new(text: &Text, memory: u64, cpus: u8) -> Result<Self, Refusal> {
        let mut plan = Self::default();
        let loads = plan.ids(text)?;
        let switch = Switch::find(text)?;
        let stub = plan.stub(text, &loads, &switch, memory, cpus);
        let mut room = switch.room();
        let (code, edits) = switch.retarget(&mut room, stub.as_ref())?;
        plan.edits.extend(edits);
        let kind = Kind::CounterReads { counters: switch.counters(), code };
        plan.changes.push(Change { offset: switch.start, kind });
        plan.overflows(text, &mut room, stub.as_ref())?;
        plan.changes.sort_by_key(|change| change.offset);
        Ok(plan)
    }

    /// Adds the stub and the calls through it, if the kernel has room for it.
    fn stub(
        &mut self,
        text: &Text,
        loads: &[ids::Load],
        switch: &Switch,
        memory: u64,
        cpus: u8,
    ) -> Option<Stub> {
        let page::Plan { calls, at, stub, pages } =
            page::Plan::new(text, loads, &switch.range(), memory, cpus)?;
        let edits = calls.iter().map(|call| Some(Edit::words(*call, &code::far_call(*call, stub.call)?)));
        self.edits.extend(edits.collect::<Option<Vec<_>>>()?);
        self.edits.push(Edit::words(at, &stub.code));
        self.changes.push(Change { offset: at, kind: Kind::Stub { calls: calls.len() } });
        self.pages = Some(pages as u64);
        Some(stub)
    }

    fn ids(&mut self, text: &Text) -> Result<Vec<ids::Load>, Refusal> {
        let loads = ids::find(text, ids::PMU_HIGH)?;
        if loads.is_empty() {
            let retargeted = ids::find(text, code::ID_HIGH).unwrap_or_default();
            return Err(retargeted
                .first()
                .map_or(Refusal::NoDriver, |load| Refusal::Already { at: load.at }));
        }
        for &ids::Load { at, register, .. } in &loads {
            self.edits.push(Edit::words(at, &[encode::lui(register, code::ID_HIGH)]));
            self.changes.push(Change { offset: at, kind: Kind::ExtensionId { register } });
        }
        Ok(loads)
    }

    fn overflows(
        &mut self,
        text: &Text,
        room: &mut switch::Room,
        stub: Option<&Stub>,
    ) -> Result<(), Refusal> {
        let (pattern, mask) = READ_SCOUNTOVF;
        let reads = text.words().filter(|(_, word)| word & mask == pattern);
        for (number, (at, word)) in reads.enumerate() {
            if number == MAX_SITES {
                return Err(Refusal::TooMany { limit: MAX_SITES });
            }
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
            let jump = encode::jump(at, code).ok_or(Refusal::TooFar { at, code })?;
            let body = match stub {
                Some(stub) => code::read_overflows_by(code, register, at, stub.read_overflows),
                None => code::read_overflows(code, register, at),
            };
            let body = body.ok_or(Refusal::TooFar { at, code })?;
            self.edits.extend([Edit::words(at, &[jump]), Edit::words(code, &body)]);
            self.changes.push(Change { offset: at, kind: Kind::OverflowRead { register, code } });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
