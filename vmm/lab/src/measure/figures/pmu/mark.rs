//! Marks: how a guest's program tells the host what it does next. On x86-64 the program makes a hypercall with the mark
//! as its number. KVM refuses hypercalls of user programs, but after its tracepoint has recorded them, and without an
//! exit to user space. For RISC-V see `riscv64.rs`.

#[cfg(target_arch = "x86_64")]
use std::sync::atomic::{AtomicBool, Ordering};

use super::SPACING;
use super::per_unit::PerUnit;

#[cfg(target_arch = "riscv64")]
pub use super::riscv64::tell_host;

#[cfg(target_arch = "x86_64")]
static IS_ON_INTEL: AtomicBool = AtomicBool::new(false);

/// Makes [`tell_host`] use the hypercall of Intel's processors.
#[cfg(target_arch = "x86_64")]
pub fn host_is_intel() {
    IS_ON_INTEL.store(true, Ordering::Relaxed);
}

/// Sends a number to the host.
#[cfg(target_arch = "x86_64")]
pub fn tell_host(code: u32) {
    let code = u64::from(code);
    if IS_ON_INTEL.load(Ordering::Relaxed) {
        // SAFETY: a hypercall of a user program only returns an error.
        unsafe { std::arch::asm!("vmcall", inout("rax") code => _, options(nostack)) };
    } else {
        // SAFETY: as above.
        unsafe { std::arch::asm!("vmmcall", inout("rax") code => _, options(nostack)) };
    }
}

/// A use of counters whose cost is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Work {
    /// Reads a counter by read(2). A unit is one read.
    Read,
    /// Switches to another task, where both tasks have counters of their own. A unit is one switch.
    Switch,
    /// Runs until a counter overflows, so that a sample is taken. A unit is one overflow.
    Overflow,
}

impl Work {
    /// Returns the numbers of units in the two kinds of windows. The cost of a unit follows from the difference of the
    /// two. Windows are shorter than the time between timer interrupts. Short work is done more often, as the clock may
    /// be coarse.
    pub fn units(self) -> [u8; 2] {
        if self == Self::Read { [2, 12] } else { [2, 4] }
    }

    /// Returns the number of instructions that the program itself executes for a unit.
    pub(super) fn own_instructions(self) -> PerUnit {
        PerUnit::whole(if self == Self::Overflow { SPACING.into() } else { 0 })
    }
}

/// A mark: what the program does until the next mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mark {
    pub work: Work,
    pub events: u8,
    pub units: u8,
}

/// The upper half of every mark's number. The lower half has ten bits.
const MAGIC: u32 = 0x7a11;
/// The mark after the last window.
pub const END: u32 = MAGIC << 16;

impl Mark {
    /// Returns the mark's number.
    pub fn code(self) -> u32 {
        let work = match self.work {
            Work::Read => 1,
            Work::Switch => 2,
            Work::Overflow => 3,
        };
        END | work << 8 | u32::from(self.events & 0xf) << 4 | u32::from(self.units & 0xf)
    }

    /// Returns true if the mark is of this work with this many events.
    pub(super) fn is_of(self, work: Work, events: u8) -> bool {
        (self.work, self.events) == (work, events)
    }

    /// Returns the mark with this number, or `None` for [`END`] and for numbers that are no marks.
    pub fn from_code(code: u32) -> Option<Self> {
        let [low, work, ..] = code.to_le_bytes();
        let work = match (code >> 16, work) {
            (MAGIC, 1) => Work::Read,
            (MAGIC, 2) => Work::Switch,
            (MAGIC, 3) => Work::Overflow,
            _ => return None,
        };
        Some(Self { work, events: low >> 4, units: low & 0xf })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_decoded_as_it_was_encoded() {
        for work in [Work::Read, Work::Switch, Work::Overflow] {
            let mark = Mark { work, events: 6, units: 10 };
            assert_eq!(Mark::from_code(mark.code()), Some(mark));
        }
        assert_eq!(Mark::from_code(END), None);
        assert_eq!(Mark::from_code(11), None, "KVM_HC_SEND_IPI");
    }
}
