//! A vCPU's slate in the guest's memory (see [`vpmu::slate`]).

use kvm_ioctls::VcpuFd;
use log::debug;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vpmu::model::Model;
use vpmu::slate::{Page, Registers, Slate};
use vpmu::source::perf::PerfEvents;

use crate::loader::slate;

/// The page, and what is known of it.
pub struct SharedSlate {
    slate: Slate,
    page: *const Page,
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
        let page = slice.ptr_guard().as_ptr().cast::<Page>();
        page.is_aligned().then(|| Self {
            slate: Slate::new(registers),
            page,
            address: slate::linux_address(physical),
            belongs: false,
            _memory: memory.clone(),
        })
    }

    /// After every exit, before anything else.
    pub fn take(&mut self, model: &mut dyn Model<PerfEvents>) {
        // SAFETY: it points to that much of the guest's memory, aligned, which stays mapped as long as `self` has a share in
        // it; all of it are atomic integers, which others may change at any time.
        let page = unsafe { &*self.page };
        self.slate.take(page, model);
    }

    /// The guest has written a register.
    pub fn is_stale(&mut self) {
        self.slate.is_stale();
    }

    /// Before the guest goes on.
    pub fn give(&mut self, model: &mut dyn Model<PerfEvents>, fd: &VcpuFd) {
        // SAFETY: as above.
        let page = unsafe { &*self.page };
        let (belongs, address) = (&mut self.belongs, self.address);
        self.slate.give(page, model, || {
            // Linux numbers its CPUs as it likes, so the kernel's part says which page it has found. It will not find another.
            *belongs = *belongs || fd.get_regs().is_ok_and(|regs| regs.r9 == address);
            if !*belongs {
                debug!("this vCPU's slate is not the one that the guest's kernel takes");
            }
            *belongs
        });
    }
}
