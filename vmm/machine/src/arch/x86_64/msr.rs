//! Reads and writes a vCPU's model-specific registers (`KVM_GET_MSRS`, `KVM_SET_MSRS`).

use kvm_bindings::{Msrs, kvm_msr_entry};
use kvm_ioctls::VcpuFd;

use crate::kvm_error::{KvmError, KvmResultExt};

/// Result of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// KVM has set the register.
    Yes,
    /// KVM does not have the register, or rejects the value.
    No,
}

/// Returns the value of a register, or `None` if KVM does not have the register.
pub fn read(vcpu: &VcpuFd, index: u32) -> Result<Option<u64>, KvmError> {
    get(vcpu, &mut read_request(index))
}

/// Creates a request to read a register. [`get`] can use it repeatedly, without an allocation for each read.
pub fn read_request(index: u32) -> Msrs {
    let entry = kvm_msr_entry { index, ..Default::default() };
    Msrs::from_entries(&[entry]).expect("one entry fits")
}

/// Carries out a request of [`read_request`]. Returns the register's value, or `None` if KVM does not have the
/// register.
pub fn get(vcpu: &VcpuFd, request: &mut Msrs) -> Result<Option<u64>, KvmError> {
    let read = vcpu.get_msrs(request).operation("read the MSRs")?;
    Ok(request.as_slice().first().filter(|_| read == 1).map(|entry| entry.data))
}

/// Writes a register.
pub fn write(vcpu: &VcpuFd, index: u32, data: u64) -> Result<Written, KvmError> {
    let entry = kvm_msr_entry { index, data, ..Default::default() };
    let written =
        vcpu.set_msrs(&Msrs::from_entries(&[entry]).expect("one entry fits")).operation("set the MSRs")?;
    Ok(if written == 1 { Written::Yes } else { Written::No })
}
