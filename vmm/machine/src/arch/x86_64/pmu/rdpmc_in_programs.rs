//! Decides whether a program's fault was caused by an RDPMC that the program may execute
//! (see [`vpmu_retarget::x86::rdpmc_in_programs`]).

use kvm_bindings::kvm_sregs;
use kvm_ioctls::VcpuFd;
use vm_memory::GuestMemoryMmap;
use vpmu_retarget::x86::Site;

use crate::arch::x86_64::cr::CR4_PCE;
use crate::arch::x86_64::paging::Tables;

const RDPMC: [u8; 2] = [Site::ESCAPE, Site::BEFORE];

/// Returns whether the instruction at the address in CR2 is an RDPMC, and programs may execute that.
pub fn is_permitted(fd: &VcpuFd, memory: &GuestMemoryMmap) -> bool {
    fd.get_sregs().is_ok_and(|sregs| is_permitted_with(&sregs, memory))
}

/// The same, with these registers.
fn is_permitted_with(sregs: &kvm_sregs, memory: &GuestMemoryMmap) -> bool {
    sregs.cr4 & CR4_PCE != 0
        && Tables::of(sregs, memory).is_some_and(|tables| tables.read_as_program(sregs.cr2) == Some(RDPMC))
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::arch::x86_64::cr::{CR0_PG, EFER_LMA};

    #[test]
    fn a_counter_is_read_for_an_rdpmc_of_a_program_that_its_kernel_permits_and_for_nothing_else() {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        // The first page of a program, behind tables that lie one after the other.
        for (table, next) in [(0x1000, 0x2007_u64), (0x2000, 0x3007), (0x3000, 0x4007), (0x4000, 0x5007)] {
            memory.write_obj(next, GuestAddress(table)).unwrap();
        }
        memory.write_slice(&[0x0f, 0x33, 0x0f, 0x32], GuestAddress(0x5000)).unwrap();
        let sregs =
            kvm_sregs { cr0: CR0_PG, cr3: 0x1000, cr4: CR4_PCE, efer: EFER_LMA, ..Default::default() };
        assert!(is_permitted_with(&sregs, &memory));
        let not_permitted = kvm_sregs { cr4: 0, ..sregs };
        assert!(!is_permitted_with(&not_permitted, &memory), "the kernel has not set CR4.PCE");
        let another = kvm_sregs { cr2: 2, ..sregs };
        assert!(!is_permitted_with(&another, &memory), "it is an RDMSR");
        let nowhere = kvm_sregs { cr2: 0x1000, ..sregs };
        assert!(!is_permitted_with(&nowhere, &memory), "the page is gone");
        memory.write_obj(0x5003_u64, GuestAddress(0x4000)).unwrap();
        assert!(!is_permitted_with(&sregs, &memory), "the page is the kernel's");
    }
}
