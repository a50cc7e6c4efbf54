//! Decides whether a program's fault was caused by an RDPMC that the program may execute
//! (see [`vpmu_retarget::x86::rdpmc_in_programs`]).

use kvm_ioctls::VcpuFd;
use vm_memory::GuestMemoryMmap;
use vpmu_retarget::x86::Site;

use crate::arch::x86_64::cr::CR4_PCE;
use crate::arch::x86_64::paging::Tables;

const RDPMC: [u8; 2] = [Site::ESCAPE, Site::BEFORE];

/// Returns whether the instruction at the address in CR2 is an RDPMC, and programs may execute that.
pub fn is_permitted(fd: &VcpuFd, memory: &GuestMemoryMmap) -> bool {
    let Ok(sregs) = fd.get_sregs() else { return false };
    sregs.cr4 & CR4_PCE != 0
        && Tables::of(&sregs, memory).is_some_and(|tables| tables.read_as_program(sregs.cr2) == Some(RDPMC))
}
