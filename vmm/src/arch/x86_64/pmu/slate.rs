//! A vCPU's slate in the guest's memory (see [`vpmu::slate`]).

use std::sync::atomic::AtomicU64;

use kvm_ioctls::VcpuFd;
use log::debug;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vpmu::model::Model;
use vpmu::slate::{Page, Registers, Slate};
use vpmu::source::perf::PerfEvents;

use crate::arch::loader::slate;

/// The page, and what is known of it.
pub struct SharedSlate {
    slate: Slate,
    page: &'static Page,
    /// What the guest's kernel calls it.
    address: u64,
    belongs: bool,
    _memory: GuestMemoryMmap,
}

impl SharedSlate {
    /// That of a vCPU.
    pub fn new(vcpu: u8, registers: Registers, memory: &GuestMemoryMmap) -> Option<Self> {
        let physical = slate::page(vcpu);
        let slice = memory.get_slice(GuestAddress(physical), size_of::<Page>()).ok()?;
        #[expect(clippy::cast_ptr_alignment, reason = "that is looked at next")]
        let page = slice.ptr_guard().as_ptr().cast::<Page>();
        if !page.is_aligned() {
            return None;
        }
        // SAFETY: it is aligned, and so much of the guest's memory, which stays mapped as long as `_memory` is there, and no
        // longer does anybody get to see it. All of it are atomic integers, of which any value is one.
        let page = unsafe { &*page };
        Some(Self {
            slate: Slate::new(registers),
            page,
            address: slate::linux_address(physical),
            belongs: false,
            _memory: memory.clone(),
        })
    }

    /// After every exit, before anything else; whether it was looked what has overflowed.
    pub fn take(&mut self, model: &mut dyn Model<PerfEvents>) -> bool {
        self.slate.take(self.page, model)
    }

    /// What the guest's kernel has noted of its APIC's entry for overflows.
    pub fn entry(&mut self) -> Option<&AtomicU64> {
        self.slate.entry(self.page)
    }

    /// The guest accesses a register in the ordinary way.
    pub fn stop(&mut self) {
        self.slate.stop(self.page);
    }

    /// Before the guest goes on, with an NMI for an overflow.
    pub fn offer(&mut self, model: &mut dyn Model<PerfEvents>) {
        self.slate.offer(self.page, model);
    }

    /// Before the guest goes on otherwise.
    pub fn give(&mut self, model: &mut dyn Model<PerfEvents>, fd: &VcpuFd) {
        let (belongs, address) = (&mut self.belongs, self.address);
        self.slate.give(self.page, model, || {
            // Linux numbers its CPUs as it likes, so the kernel's part says which page it has found. It will not find another.
            *belongs = *belongs || fd.get_regs().is_ok_and(|regs| regs.r9 == address);
            if !*belongs {
                debug!("this vCPU's slate is not the one that the guest's kernel takes");
            }
            *belongs
        });
    }
}
