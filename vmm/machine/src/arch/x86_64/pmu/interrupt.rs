//! Delivers overflow interrupts through the guest's local APIC (APM volume 2, 16.4.3 and 16.4.5; SDM volume 3, 11.5.1).
//!
//! KVM emulates the APIC, and the guest writes the LVT entry for performance counters without an exit to Tally. Tally
//! therefore reads the entry when an interrupt is due. It skips the read if the guest's kernel notes its writes to the
//! entry and has written nothing since.
//!
//! Tally never sets the APIC's whole state, because that would undo what other interrupts have changed meanwhile. Where
//! a delivery sets the entry's mask ([`OnDelivery`]), it does so only in x2APIC mode, in which each register can be
//! written by its MSR. A kernel that notes its writes has the mask among its notes, and KVM's entry stays as it is, if
//! the kernel has used its notes since the last overflow. In xAPIC mode the guest finds its entry unchanged. While
//! software has disabled the APIC, all entries are masked, which KVM implements.
//!
//! An NMI needs no system call if KVM has stored the vCPU's pending exceptions at the exit: Tally makes the NMI pending
//! there, and KVM takes it over at the next entry (`KVM_SYNC_X86_EVENTS`).

use kvm_bindings::{KVM_VCPUEVENT_VALID_NMI_PENDING, Msrs, kvm_lapic_state, kvm_msi, kvm_vcpu_events};
use kvm_ioctls::{SyncReg, VcpuFd, VmFd};
use vpmu::shared_page::LvtNote;
use vpmu::x86::X2APIC_LVTPC;

use crate::arch::x86_64::msr;
use crate::kvm_error::{KvmError, KvmResultExt};

/// Offsets of registers in the APIC's page.
const ID: usize = 0x20;
const PERFORMANCE: usize = 0x340;

const MASKED: u32 = 1 << 16;
/// Delivery modes of an LVT entry.
const FIXED: u32 = 0;
const NMI: u32 = 4;
/// Bits of `IA32_APIC_BASE`.
const GLOBAL_ENABLE: u64 = 1 << 11;
const X2APIC_MODE: u64 = 1 << 10;

/// Delivery of an overflow by the APIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    /// Not at all: the entry is masked, the APIC is disabled, or the entry's delivery mode is not valid for a counter.
    None,
    /// A non-maskable interrupt.
    Nmi,
    /// A fixed interrupt.
    Fixed {
        /// Vector of the interrupt.
        vector: u8,
    },
}

/// Effect of the delivery of an interrupt on the LVT entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnDelivery {
    /// Sets the mask bit, which the guest then has to clear.
    SetsMask,
    /// Leaves the entry unchanged.
    Unchanged,
}

/// The LVT entry for performance counters of a vCPU's local APIC.
pub struct LvtEntry {
    on_delivery: OnDelivery,
    /// The vCPU's number, which is also its APIC ID in x2APIC mode.
    vcpu: u8,
    /// Request to read the entry in x2APIC mode.
    request: Msrs,
    /// Last value that both KVM and the note of the guest's kernel had for the entry. While the note has this value,
    /// KVM need not be asked.
    known: Option<u64>,
    pending_exceptions: PendingExceptions,
}

/// Whether KVM stores the vCPU's pending exceptions, interrupts and NMIs (`struct kvm_vcpu_events`) in `struct kvm_run`
/// at each exit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PendingExceptions {
    /// It does.
    Stored,
    /// It does not, which makes an exit cheaper.
    NotStored,
}

impl LvtEntry {
    /// Creates the entry of a vCPU.
    pub fn new(on_delivery: OnDelivery, vcpu: u8) -> Self {
        Self {
            on_delivery,
            vcpu,
            request: msr::read_request(X2APIC_LVTPC),
            known: None,
            pending_exceptions: PendingExceptions::NotStored,
        }
    }

    /// Sets whether KVM stores the vCPU's pending exceptions at the next exits. An NMI then costs no system call.
    pub fn store_pending_exceptions(&mut self, fd: &mut VcpuFd, exceptions: PendingExceptions) {
        if self.pending_exceptions == exceptions {
            return;
        }
        self.pending_exceptions = exceptions;
        match exceptions {
            PendingExceptions::Stored => fd.set_sync_valid_reg(SyncReg::VcpuEvents),
            PendingExceptions::NotStored => fd.clear_sync_valid_reg(SyncReg::VcpuEvents),
        }
    }

    /// Returns the vCPU's pending exceptions, as of the last exit. `None` if they cannot be found out.
    pub fn pending_exceptions(&self, fd: &VcpuFd) -> Option<kvm_vcpu_events> {
        match self.pending_exceptions {
            PendingExceptions::Stored => Some(fd.sync_regs().events),
            PendingExceptions::NotStored => fd.get_vcpu_events().ok(),
        }
    }

    /// Delivers an interrupt and returns how. `note` is what the guest's kernel notes of the entry, if it does.
    pub fn deliver(
        &mut self,
        vm: &VmFd,
        fd: &mut VcpuFd,
        note: Option<LvtNote<'_>>,
    ) -> Result<Delivery, KvmError> {
        let base = fd.get_kvm_run().apic_base;
        if base & GLOBAL_ENABLE == 0 {
            return Ok(Delivery::None);
        }
        let is_x2apic = base & X2APIC_MODE != 0;
        if is_x2apic && note.is_some_and(|note| note.is_masked()) {
            return Ok(Delivery::None);
        }
        // Reading one register costs less than copying all of them.
        let written = note.and_then(|note| note.written);
        let from_msr = if is_x2apic { self.find_entry(fd, written)? } else { None };
        let (entry, id) = if let Some(value) = from_msr {
            (low(value), self.vcpu.into())
        } else {
            let page = fd.get_lapic().operation("read the local APIC")?;
            (register(&page, PERFORMANCE), register(&page, ID) >> 24)
        };
        let delivery = Delivery::of(entry);
        if self.on_delivery == OnDelivery::SetsMask && is_x2apic && delivery != Delivery::None {
            // With the note, neither this nor the guest's write that opens the entry again costs an exit.
            let is_masked = note.is_some_and(|note| note.mask(entry.into()));
            if !is_masked {
                // KVM accepts every valid entry, but only in x2APIC mode.
                msr::write(fd, X2APIC_LVTPC, (entry | MASKED).into())?;
                self.known = None;
            }
        }
        let data = match delivery {
            Delivery::None => return Ok(delivery),
            Delivery::Nmi
                if self.pending_exceptions == PendingExceptions::Stored
                    && make_nmi_pending(&mut fd.sync_regs_mut().events) =>
            {
                fd.set_sync_dirty_reg(SyncReg::VcpuEvents);
                return Ok(delivery);
            }
            Delivery::Nmi => NMI << 8,
            Delivery::Fixed { vector } => vector.into(),
        };
        // APIC IDs have 8 bits in Tally's machines. An NMI by `KVM_NMI` would cost more than an MSI.
        let message = kvm_msi { address_lo: 0xfee0_0000 | (id & 0xff) << 12, data, ..Default::default() };
        // It is not an error if the guest's APIC does not accept the interrupt.
        vm.signal_msi(message).operation("send an interrupt")?;
        Ok(delivery)
    }

    /// Returns the entry in x2APIC mode, or `None` if KVM does not return it. Asking KVM is a tenth of an interrupt's
    /// cost, so the note is used without asking if KVM has had the same value before.
    fn find_entry(&mut self, fd: &VcpuFd, noted: Option<u64>) -> Result<Option<u64>, KvmError> {
        if noted.is_some() && noted == self.known {
            return Ok(noted);
        }
        let entry = msr::get(fd, &mut self.request)?;
        if noted.is_some() && noted == entry {
            self.known = entry;
        }
        Ok(entry)
    }
}

/// Makes an NMI pending in a vCPU's events, as KVM has stored them. Returns false, and does nothing, if something else
/// is about to be delivered: the events do not describe that completely.
///
/// The flags name what is set: nothing of which another thread may have changed the state since the exit, except the
/// NMI itself. Another NMI that has come since is delivered together with this one, as on a processor that has not
/// taken the first yet.
fn make_nmi_pending(events: &mut kvm_vcpu_events) -> bool {
    let is_quiet = events.exception.injected == 0
        && events.exception.pending == 0
        && events.interrupt.injected == 0
        && events.nmi.injected == 0
        && events.smi.smm == 0;
    if is_quiet {
        events.nmi.pending = 1;
        events.flags = KVM_VCPUEVENT_VALID_NMI_PENDING;
    }
    is_quiet
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
        /// Lower vectors are for exceptions. The APIC then records an error and delivers nothing.
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
    fn an_nmi_is_added_to_a_vcpus_events_unless_another_event_is_being_delivered() {
        let mut events = kvm_vcpu_events { flags: 0xf, ..Default::default() };
        events.nmi.masked = 1;
        assert!(make_nmi_pending(&mut events));
        assert_eq!(
            (events.flags, events.nmi.pending, events.nmi.masked),
            (KVM_VCPUEVENT_VALID_NMI_PENDING, 1, 1)
        );
        let busy: [fn(&mut kvm_vcpu_events); 4] = [
            |events| events.exception.injected = 1,
            |events| events.interrupt.injected = 1,
            |events| events.nmi.injected = 1,
            |events| events.smi.smm = 1,
        ];
        for make_busy in busy {
            let mut events = kvm_vcpu_events { flags: 0xf, ..Default::default() };
            make_busy(&mut events);
            assert!(!make_nmi_pending(&mut events));
            assert_eq!((events.flags, events.nmi.pending), (0xf, 0));
        }
    }

    #[test]
    fn registers_are_read_from_the_apic_page() {
        let mut page = kvm_lapic_state::default();
        for (at, byte) in 0x0103_00f3_u32.to_le_bytes().into_iter().enumerate() {
            page.regs[PERFORMANCE + at] = byte.cast_signed();
        }
        assert_eq!(register(&page, PERFORMANCE), 0x0103_00f3);
    }
}
