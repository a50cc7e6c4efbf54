//! Decides whether a program's fault was caused by an RDPMC that the program may execute
//! (see [`vpmu_retarget::rdpmc_in_programs`]).

use kvm_ioctls::VcpuFd;
use vm_memory::GuestMemoryMmap;

use crate::arch::x86_64::paging::Tables;

/// `CR4.PCE`: programs may execute RDPMC.
const CR4_PCE: u64 = 1 << 8;
const RDPMC: [u8; 2] = [0x0f, 0x33];

/// Returns whether the instruction at the address in CR2 is an RDPMC, and programs may execute that.
pub fn is_permitted(fd: &VcpuFd, memory: &GuestMemoryMmap) -> bool {
    let Ok(sregs) = fd.get_sregs() else { return false };
    sregs.cr4 & CR4_PCE != 0
        && Tables::of(&sregs, memory).is_some_and(|tables| tables.read_as_program(sregs.cr2) == Some(RDPMC))
}
