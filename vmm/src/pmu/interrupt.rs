//! The interrupt of an overflow, as the guest's local APIC has it (APM volume 2, 16.4.3 and 16.4.5; SDM volume 3, 11.5.1).
//!
//! The APIC is KVM's, and the guest sets its performance-counter entry without an exit. So it is looked at when an interrupt
//! is due. It is never written as a whole: that would undo what other interrupts have set meanwhile. So where the entry masks
//! itself ([`Entry`]), that is done only in x2APIC mode, in which each register can be written by itself; in the older mode a
//! guest finds its entry as it has left it.

use kvm_bindings::{kvm_lapic_state, kvm_msi};
use kvm_ioctls::{VcpuFd, VmFd};

use crate::kvm::{Doing, KvmError};
use crate::msr;

/// Offsets in the APIC's page.
const ID: usize = 0x20;
const SPURIOUS: usize = 0xf0;
const PERFORMANCE: usize = 0x340;

const SOFTWARE_ENABLE: u32 = 1 << 8;
const MASKED: u32 = 1 << 16;
/// In `APIC_BASE`.
const GLOBAL_ENABLE: u64 = 1 << 11;
const X2APIC_MODE: u64 = 1 << 10;
/// The registers' own MSRs in that mode.
const X2APIC_ID: u32 = 0x802;
const X2APIC_SPURIOUS: u32 = 0x80f;
const X2APIC_PERFORMANCE: u32 = 0x834;

/// What the APIC makes of an overflow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    /// Nothing: the entry is masked, the APIC is off, or the entry's type is none that a counter has.
    None,
    /// A non-maskable interrupt.
    Nmi,
    /// An ordinary interrupt.
    Fixed {
        /// Its vector.
        vector: u8,
    },
}

/// What becomes of the entry when it has delivered an interrupt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// It masks itself, until the guest writes it anew.
    MasksItself,
    /// Nothing.
    Stays,
}

/// What the local APIC has to say to an overflow.
#[derive(Debug, Clone, Copy)]
struct Apic {
    id: u8,
    spurious: u32,
    /// The performance counters' entry.
    entry: u32,
}

/// Delivers one, and says how.
pub fn deliver(vm: &VmFd, fd: &mut VcpuFd, entry: Entry) -> Result<Delivery, KvmError> {
    let base = fd.get_kvm_run().apic_base;
    if base & GLOBAL_ENABLE == 0 {
        return Ok(Delivery::None);
    }
    let is_x2apic = base & X2APIC_MODE != 0;
    let apic = Apic::of(fd, is_x2apic)?;
    let delivery = apic.delivery();
    if entry == Entry::MasksItself && is_x2apic && delivery != Delivery::None {
        // KVM takes whatever entry there can be, and in no other mode than this.
        msr::write(fd, X2APIC_PERFORMANCE, (apic.entry | MASKED).into())?;
    }
    match delivery {
        Delivery::None => {}
        Delivery::Nmi => fd.nmi().doing("send an NMI")?,
        Delivery::Fixed { vector } => {
            let address_lo = 0xfee0_0000 | u32::from(apic.id) << 12;
            let message = kvm_msi { address_lo, data: vector.into(), ..Default::default() };
            // It is no error if the guest's APIC does not take it.
            vm.signal_msi(message).doing("send an interrupt")?;
        }
    }
    Ok(delivery)
}

impl Apic {
    /// That of a vCPU. Where each register can be read by itself, that costs less than a copy of all of them.
    fn of(fd: &VcpuFd, is_x2apic: bool) -> Result<Self, KvmError> {
        let registers = [X2APIC_ID, X2APIC_SPURIOUS, X2APIC_PERFORMANCE];
        if is_x2apic && let Some(values) = msr::read_all(fd, registers)? {
            // They are 32 bits wide, and the ids of our machines are of 8 bits.
            #[expect(clippy::cast_possible_truncation, reason = "see above")]
            let [id, spurious, entry] = values.map(|value| value as u32);
            #[expect(clippy::cast_possible_truncation, reason = "see above")]
            return Ok(Self { id: id as u8, spurious, entry });
        }
        Ok(Self::from_page(&fd.get_lapic().doing("read the local APIC")?))
    }

    fn from_page(page: &kvm_lapic_state) -> Self {
        let register = |offset: usize| {
            let byte = |at: usize| page.regs[offset + at].cast_unsigned();
            u32::from_le_bytes([byte(0), byte(1), byte(2), byte(3)])
        };
        let [.., id] = register(ID).to_le_bytes();
        Self { id, spurious: register(SPURIOUS), entry: register(PERFORMANCE) }
    }

    fn delivery(self) -> Delivery {
        const FIXED: u32 = 0;
        const NMI: u32 = 4;
        /// Below are exceptions: the APIC notes an error and delivers nothing.
        const FIRST_VECTOR: u8 = 16;
        if self.entry & MASKED != 0 || self.spurious & SOFTWARE_ENABLE == 0 {
            return Delivery::None;
        }
        let [vector, ..] = self.entry.to_le_bytes();
        match self.entry >> 8 & 7 {
            NMI => Delivery::Nmi,
            FIXED if vector >= FIRST_VECTOR => Delivery::Fixed { vector },
            _ => Delivery::None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn apic(spurious: u32, entry: u32) -> Apic {
        let mut page = kvm_lapic_state::default();
        for (offset, value) in [(ID, 3 << 24), (SPURIOUS, spurious), (PERFORMANCE, entry)] {
            for (at, byte) in value.to_le_bytes().into_iter().enumerate() {
                page.regs[offset + at] = byte.cast_signed();
            }
        }
        Apic::from_page(&page)
    }

    #[test]
    fn the_entry_says_how_an_overflow_is_delivered() {
        assert_eq!(apic(0x1ff, 0x400).delivery(), Delivery::Nmi);
        assert_eq!(apic(0x1ff, 0xf3).delivery(), Delivery::Fixed { vector: 0xf3 });
        assert_eq!(apic(0x1ff, 0xf3).id, 3);
        assert_eq!(apic(0x1ff, 0x10400).delivery(), Delivery::None, "masked");
        assert_eq!(apic(0xff, 0x400).delivery(), Delivery::None, "disabled by software");
        assert_eq!(apic(0x1ff, 0x0f).delivery(), Delivery::None, "the vector of an exception");
        assert_eq!(apic(0x1ff, 0x500).delivery(), Delivery::None, "INIT");
    }
}
