//! The VM generation ID: 16 random bytes in the guest's memory that are others after the guest was restored, and an
//! interrupt that says so. Linux (`CONFIG_VMGENID`) lets its random generator begin anew then.
//!
//! How the guest finds both depends on the architecture.

use kvm_ioctls::VmFd;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError, GuestMemoryMmap};

use crate::entropy::entropy;
use crate::kvm_error::{KvmError, KvmResultExt};

pub const LEN: usize = 16;

/// Gives the guest an ID that no other one has.
pub fn write_new(memory: &GuestMemoryMmap, address: u64) -> Result<(), GuestMemoryError> {
    memory.write_slice(&entropy::<LEN>(), GuestAddress(address))
}

/// Tells the guest that it has another ID.
pub fn announce(vm: &VmFd, gsi: u32) -> Result<(), KvmError> {
    // The interrupt is edge-triggered.
    [true, false]
        .into_iter()
        .try_for_each(|level| vm.set_irq_line(gsi, level))
        .operation("interrupt the guest")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_guests_have_the_same_id() {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let new = || {
            write_new(&memory, 0x1000).unwrap();
            memory.read_obj::<[u8; LEN]>(GuestAddress(0x1000)).unwrap()
        };
        assert_ne!(new(), new());
    }
}
