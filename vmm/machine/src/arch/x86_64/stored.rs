//! Registers that KVM stores in `struct kvm_run` at each exit (`KVM_CAP_SYNC_REGS`): that makes an exit dearer, and
//! spares whoever looks at them a system call for each kind.
//!
//! Whoever reads them finds those of the last exit, stored or not: only what an exit costs depends on what is stored.

use kvm_bindings::{kvm_regs, kvm_sregs};
use kvm_ioctls::{SyncReg, VcpuFd};

/// Makes KVM store the general registers at the next exits.
pub fn store_general(fd: &mut VcpuFd) {
    fd.set_sync_valid_reg(SyncReg::Register);
}

/// Makes KVM store the general registers and those of the system at the next exits.
pub fn store(fd: &mut VcpuFd) {
    fd.set_sync_valid_reg(SyncReg::Register);
    fd.set_sync_valid_reg(SyncReg::SystemRegister);
}

/// Makes KVM store no registers at the next exits, until somebody else wants them.
pub fn forget(fd: &mut VcpuFd) {
    fd.clear_sync_valid_reg(SyncReg::Register);
    fd.clear_sync_valid_reg(SyncReg::SystemRegister);
}

/// Returns the general registers.
pub fn general(fd: &mut VcpuFd) -> Option<kvm_regs> {
    if are_stored(fd, SyncReg::Register) { Some(fd.sync_regs_mut().regs) } else { fd.get_regs().ok() }
}

/// Returns the registers of the system.
pub fn system(fd: &mut VcpuFd) -> Option<kvm_sregs> {
    if are_stored(fd, SyncReg::SystemRegister) { Some(fd.sync_regs_mut().sregs) } else { fd.get_sregs().ok() }
}

/// Nobody changes what is stored between an exit and the look at its registers, which is the first thing that is done.
fn are_stored(fd: &mut VcpuFd, registers: SyncReg) -> bool {
    fd.get_kvm_run().kvm_valid_regs & registers as u64 != 0
}
