//! A vCPU's shared page, mapped in the guest's memory (see [`vpmu::shared_page`]).

use std::sync::atomic::AtomicU64;

use kvm_ioctls::VcpuFd;
use log::debug;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vpmu::model::Model;
use vpmu::shared_page::{Page, Registers, SharedPage};
use vpmu_perf::PerfEvents;

use crate::arch::loader::shared_page;

/// The page of one vCPU.
pub struct GuestPage {
    shared: SharedPage,
    page: &'static Page,
    /// Its address in the guest's kernel.
    address: u64,
    /// The guest's kernel has named this page as the one of its current CPU.
    is_confirmed: bool,
    _memory: GuestMemoryMmap,
}

impl GuestPage {
    /// Maps the page of a vCPU. Returns `None` if the guest's memory does not have it.
    pub fn new(vcpu: u8, registers: Registers, memory: &GuestMemoryMmap) -> Option<Self> {
        let physical = shared_page::page(vcpu);
        let slice = memory.get_slice(GuestAddress(physical), size_of::<Page>()).ok()?;
        #[expect(clippy::cast_ptr_alignment, reason = "checked below")]
        let page = slice.ptr_guard().as_ptr().cast::<Page>();
        if !page.is_aligned() {
            return None;
        }
        // SAFETY: the pointer is aligned, and the guest's memory has this many bytes there (`get_slice`). The memory stays
        // mapped as long as `_memory` lives, and no reference to the page leaves this struct. All fields are atomic integers,
        // for which every value is valid.
        let page = unsafe { &*page };
        Some(Self {
            shared: SharedPage::new(registers),
            page,
            address: shared_page::linux_address(physical),
            is_confirmed: false,
            _memory: memory.clone(),
        })
    }

    /// See [`SharedPage::apply`].
    pub fn apply(&mut self, model: &mut dyn Model<PerfEvents>) -> bool {
        self.shared.apply(self.page, model)
    }

    /// See [`SharedPage::lvt_entry`].
    pub fn lvt_entry(&mut self) -> Option<&AtomicU64> {
        self.shared.lvt_entry(self.page)
    }

    /// See [`SharedPage::withdraw`].
    pub fn withdraw(&mut self) {
        self.shared.withdraw(self.page);
    }

    /// See [`SharedPage::offer`].
    pub fn offer(&mut self, model: &mut dyn Model<PerfEvents>) {
        self.shared.offer(self.page, model);
    }

    /// See [`SharedPage::activate`].
    pub fn activate(&mut self, model: &mut dyn Model<PerfEvents>, fd: &VcpuFd) {
        let (is_confirmed, address) = (&mut self.is_confirmed, self.address);
        self.shared.activate(self.page, model, || {
            // Linux may number its CPUs differently, so the stub passes the address of the page that it uses in R9. It always
            // uses the same one.
            *is_confirmed = *is_confirmed || fd.get_regs().is_ok_and(|regs| regs.r9 == address);
            if !*is_confirmed {
                debug!("the guest's kernel uses another shared page than this vCPU's");
            }
            *is_confirmed
        });
    }
}
