//! The interrupt of an overflow, as the guest's local APIC has it (APM volume 2, 16.4.3 and 16.4.5; SDM volume 3, 11.5.1).
//!
//! The APIC is KVM's, and the guest sets its performance-counter entry without an exit. So it is looked at when an interrupt
//! is due, unless a kernel that notes what it writes there has written nothing since. It is never written as a whole: that
//! would undo what other interrupts have set meanwhile. So where the entry masks itself ([`Entry`]), that is done only in
//! x2APIC mode, in which each register can be written by itself; in the older mode a guest finds its entry as it has left it.
//! In an APIC that software has disabled all entries are masked: KVM does that, too.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use kvm_bindings::{Msrs, kvm_lapic_state, kvm_msi};
use kvm_ioctls::{VcpuFd, VmFd};
use vpmu::x86::OVERFLOW_ENTRY;

use crate::arch::x86_64::msr;
use crate::kvm_error::{Doing, KvmError};

/// Offsets in the APIC's page.
const ID: usize = 0x20;
const PERFORMANCE: usize = 0x340;

const MASKED: u32 = 1 << 16;
/// How an interrupt is delivered.
const FIXED: u32 = 0;
const NMI: u32 = 4;
/// In `APIC_BASE`.
const GLOBAL_ENABLE: u64 = 1 << 11;
const X2APIC_MODE: u64 = 1 << 10;

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

/// A vCPU's line for overflows.
pub struct LvtEntry {
    entry: Entry,
    /// The vCPU's number, which is its APIC's id in x2APIC mode.
    vcpu: u8,
    /// The question for the entry in x2APIC mode.
    question: Msrs,
    /// What was once found there as the guest's kernel had noted it, which need not be asked for again.
    known: Option<u64>,
}

impl LvtEntry {
    /// A vCPU's line, with such an entry.
    pub fn new(entry: Entry, vcpu: u8) -> Self {
        Self { entry, vcpu, question: msr::question(OVERFLOW_ENTRY), known: None }
    }

    /// Delivers an interrupt, and says how. A kernel may have noted what it has written to the entry.
    pub fn deliver(
        &mut self,
        vm: &VmFd,
        fd: &mut VcpuFd,
        noted: Option<&AtomicU64>,
    ) -> Result<Delivery, KvmError> {
        let base = fd.get_kvm_run().apic_base;
        if base & GLOBAL_ENABLE == 0 {
            return Ok(Delivery::None);
        }
        let is_x2apic = base & X2APIC_MODE != 0;
        // To read a register by itself costs less than a copy of all of them.
        let by_itself = if is_x2apic { self.find_entry(fd, noted)? } else { None };
        let (entry, id) = if let Some(value) = by_itself {
            (low(value), self.vcpu.into())
        } else {
            let page = fd.get_lapic().doing("read the local APIC")?;
            (register(&page, PERFORMANCE), register(&page, ID) >> 24)
        };
        let delivery = Delivery::of(entry);
        if self.entry == Entry::MasksItself && is_x2apic && delivery != Delivery::None {
            // KVM takes whatever entry there can be, and in no other mode than this.
            let masked = (entry | MASKED).into();
            msr::write(fd, OVERFLOW_ENTRY, masked)?;
            match noted {
                Some(noted) => noted.store(masked, Relaxed),
                None => self.known = None,
            }
        }
        let data = match delivery {
            Delivery::None => return Ok(delivery),
            Delivery::Nmi => NMI << 8,
            Delivery::Fixed { vector } => vector.into(),
        };
        // The ids of our machines are of 8 bits. An NMI by a request of its own to the vCPU would cost more.
        let message = kvm_msi { address_lo: 0xfee0_0000 | (id & 0xff) << 12, data, ..Default::default() };
        // It is no error if the guest's APIC does not take it.
        vm.signal_msi(message).doing("send an interrupt")?;
        Ok(delivery)
    }

    /// The entry in x2APIC mode, if KVM gives it. To ask is a tenth of what an interrupt costs, so what is noted is
    /// believed if the same was true before.
    fn find_entry(&mut self, fd: &VcpuFd, noted: Option<&AtomicU64>) -> Result<Option<u64>, KvmError> {
        let noted = noted.map(|noted| noted.load(Relaxed));
        if noted.is_some() && noted == self.known {
            return Ok(noted);
        }
        let entry = msr::ask(fd, &mut self.question)?;
        if noted.is_some() && noted == entry {
            self.known = entry;
        }
        Ok(entry)
    }
}

fn register(page: &kvm_lapic_state, offset: usize) -> u32 {
    let byte = |at: usize| page.regs[offset + at].cast_unsigned();
    u32::from_le_bytes([byte(0), byte(1), byte(2), byte(3)])
}

/// The APIC's registers have 32 bits.
#[expect(clippy::cast_possible_truncation, reason = "said above")]
fn low(value: u64) -> u32 {
    value as u32
}

impl Delivery {
    fn of(entry: u32) -> Self {
        /// Below are exceptions: the APIC notes an error and delivers nothing.
        const FIRST_VECTOR: u8 = 16;
        if entry & MASKED != 0 {
            return Self::None;
        }
        let [vector, ..] = entry.to_le_bytes();
        match entry >> 8 & 7 {
            NMI => Self::Nmi,
            FIXED if vector >= FIRST_VECTOR => Self::Fixed { vector },
            _ => Self::None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_entry_says_how_an_overflow_is_delivered() {
        assert_eq!(Delivery::of(0x400), Delivery::Nmi);
        assert_eq!(Delivery::of(0xf3), Delivery::Fixed { vector: 0xf3 });
        assert_eq!(Delivery::of(0x10400), Delivery::None, "masked");
        assert_eq!(Delivery::of(0x0f), Delivery::None, "the vector of an exception");
        assert_eq!(Delivery::of(0x500), Delivery::None, "INIT");
    }

    #[test]
    fn registers_are_read_from_the_page_as_the_guest_has_them() {
        let mut page = kvm_lapic_state::default();
        for (at, byte) in 0x0103_00f3_u32.to_le_bytes().into_iter().enumerate() {
            page.regs[PERFORMANCE + at] = byte.cast_signed();
        }
        assert_eq!(register(&page, PERFORMANCE), 0x0103_00f3);
    }
}
