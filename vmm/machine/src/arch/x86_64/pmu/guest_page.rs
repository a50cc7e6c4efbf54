//! A vCPU's shared page in the guest's memory (see [`vpmu::shared_page`]).

use kvm_ioctls::VcpuFd;
use log::debug;
use vm_memory::GuestMemoryMmap;
use vpmu::shared_page::Page;

use crate::arch::x86_64::memory::{linux_address, shared_page};
use crate::memory::{InGuest, OfAtomics};

// SAFETY: all its fields are atomic integers, or arrays of them.
unsafe impl OfAtomics for Page {}

/// Returns the page of a vCPU, or `None` if it is not within the guest's memory.
pub fn guest_page(vcpu: u8, memory: &GuestMemoryMmap) -> Option<InGuest<Page>> {
    InGuest::at(shared_page(vcpu), memory)
}

/// Checks that the guest's kernel uses the page of this vCPU. Linux may number its CPUs differently.
pub struct PageCheck {
    /// Virtual address of the page in the guest's kernel.
    address: u64,
    is_confirmed: bool,
}

impl PageCheck {
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
