//! How a program tells the host what it is about to do. On x86-64 a guest's makes a hypercall whose number says it. KVM refuses
//! the call to a user program, but its tracepoint has seen it; nothing leaves KVM for it. RISC-V's way is another.

use super::SPACING;
use super::windows::PerUnit;

#[cfg(target_arch = "riscv64")]
pub use super::riscv64::tell_host;

/// Says a number to the host.
#[cfg(target_arch = "x86_64")]
pub fn tell_host(code: u32) {
    // SAFETY: a hypercall of a user program does nothing but return an error.
    unsafe {
        std::arch::asm!("vmmcall", inout("rax") u64::from(code) => _, options(nostack));
    }
}

/// What a guest can do with its counters, over and over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Work {
    /// Reads a counter by read(2). A unit is one.
    Read,
    /// Gives the processor to another task, where both have counters of their own. A unit is one switch.
    Switch,
    /// Counts on until a counter overflows, and has a sample taken. A unit is one overflow.
    Overflow,
}

impl Work {
    /// How often it is done in a window between two marks, and in others: what one costs is the difference. A window is shorter than
    /// the time between a clock's interrupts, and what is short is done more often, because a clock may not be fine.
    pub fn units(self) -> [u8; 2] {
        if self == Self::Read { [2, 12] } else { [2, 4] }
    }

    /// The instructions that a unit executes for its own sake.
    pub(super) fn own(self) -> PerUnit {
        PerUnit::whole(if self == Self::Overflow { SPACING.into() } else { 0 })
    }
}

/// What is done from here to the next mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mark {
    /// What.
    pub work: Work,
    /// With so many events.
    pub events: u8,
    /// So often.
    pub units: u8,
}

/// The upper half of the number of every mark; the lower has ten bits.
const MAGIC: u32 = 0x7a11;
/// The mark after the last.
pub const END: u32 = MAGIC << 16;

impl Mark {
    /// As a number.
    pub fn code(self) -> u32 {
        let work = match self.work {
            Work::Read => 1,
            Work::Switch => 2,
            Work::Overflow => 3,
        };
        END | work << 8 | u32::from(self.events & 0xf) << 4 | u32::from(self.units & 0xf)
    }

    /// Whether this is done, with so many events.
    pub(super) fn is_of(self, work: Work, events: u8) -> bool {
        (self.work, self.events) == (work, events)
    }

    /// What a number says; nothing at the end.
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
    fn a_mark_is_read_as_it_was_made() {
        for work in [Work::Read, Work::Switch, Work::Overflow] {
            let mark = Mark { work, events: 6, units: 10 };
            assert_eq!(Mark::from_code(mark.code()), Some(mark));
        }
        assert_eq!(Mark::from_code(END), None);
        assert_eq!(Mark::from_code(11), None, "KVM_HC_SEND_IPI");
    }
}
