//! How a guest's program tells the host what it is about to do: a hypercall whose number says it. KVM refuses the call to
//! a user program, but its tracepoint has seen it; nothing leaves KVM for it.

use super::SPACING;
use super::windows::PerUnit;

/// Says a number to the host.
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

/// The upper half of the number of every mark.
const MAGIC: u32 = 0x7a11;
/// The mark after the last.
pub const END: u32 = MAGIC << 16;

impl Mark {
    /// As the number of a hypercall.
    pub fn code(self) -> u32 {
        let work = match self.work {
            Work::Read => 1,
            Work::Switch => 2,
            Work::Overflow => 3,
        };
        END | work << 12 | u32::from(self.events & 0xf) << 8 | u32::from(self.units)
    }

    /// What a hypercall's number says; nothing at the end.
    pub fn from_code(code: u32) -> Option<Self> {
        let [units, low, ..] = code.to_le_bytes();
        let work = match (code >> 16, low >> 4) {
            (MAGIC, 1) => Work::Read,
            (MAGIC, 2) => Work::Switch,
            (MAGIC, 3) => Work::Overflow,
            _ => return None,
        };
        Some(Self { work, events: low & 0xf, units })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_read_as_it_was_made() {
        for work in [Work::Read, Work::Switch, Work::Overflow] {
            let mark = Mark { work, events: 6, units: 40 };
            assert_eq!(Mark::from_code(mark.code()), Some(mark));
        }
        assert_eq!(Mark::from_code(END), None);
        assert_eq!(Mark::from_code(11), None, "KVM_HC_SEND_IPI");
    }
}
