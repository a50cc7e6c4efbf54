//! A vCPU's shared page in the guest's memory (see [`vpmu::shared_page`]).

use std::ops::Deref;

use kvm_ioctls::VcpuFd;
use log::debug;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vpmu::shared_page::Page;

use crate::arch::x86_64::memory::{linux_address, shared_page};

/// The shared page of a vCPU.
pub struct GuestPage {
    page: &'static Page,
    _memory: GuestMemoryMmap,
}

impl GuestPage {
    /// Returns the page of a vCPU, or `None` if the page is not within the guest's memory.
    pub fn new(vcpu: u8, memory: &GuestMemoryMmap) -> Option<Self> {
        let slice = memory.get_slice(GuestAddress(shared_page(vcpu)), size_of::<Page>()).ok()?;
        #[expect(clippy::cast_ptr_alignment, reason = "checked below")]
        let page = slice.ptr_guard().as_ptr().cast::<Page>();
        if !page.is_aligned() {
            return None;
        }
        // SAFETY: the pointer is aligned, and the guest's memory has this many bytes there (`get_slice`). The memory
        // stays mapped as long as `_memory` lives, and no reference to the page outlives this struct (`deref`). All
        // fields are atomic integers, for which every value is valid.
        let page = unsafe { &*page };
        Some(Self { page, _memory: memory.clone() })
    }
}

impl Deref for GuestPage {
    type Target = Page;

    fn deref(&self) -> &Page {
        self.page
    }
}

/// Checks that the guest's kernel uses the page of this vCPU. Linux may number its CPUs differently.
pub struct Confirmation {
    /// Virtual address of the page in the guest's kernel.
    address: u64,
    is_confirmed: bool,
}

impl Confirmation {
    /// Creates the check for a vCPU. Nothing is confirmed yet.
    pub fn new(vcpu: u8) -> Self {
        Self { address: linux_address(shared_page(vcpu)), is_confirmed: false }
    }

    /// Returns true if the guest's kernel uses this page. At an exit of the stub, R9 holds the address of the page that
    /// the stub uses. The stub always uses the same page on a CPU, so one confirmation is enough.
    pub fn confirm(&mut self, fd: &VcpuFd) -> bool {
        self.is_confirmed = self.is_confirmed || fd.get_regs().is_ok_and(|regs| regs.r9 == self.address);
        if !self.is_confirmed {
            debug!("the guest's kernel uses another shared page than this vCPU's");
        }
        self.is_confirmed
    }
}
