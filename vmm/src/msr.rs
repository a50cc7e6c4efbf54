//! Model-specific registers of a vCPU, as KVM has them.

use kvm_bindings::{Msrs, kvm_msr_entry};
use kvm_ioctls::VcpuFd;

use crate::kvm::{Doing, KvmError};

/// Whether KVM has taken a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Written {
    /// It has.
    Yes,
    /// It has no such register, or not with this value.
    No,
}

/// The value of a register, if KVM has it.
pub fn read(vcpu: &VcpuFd, index: u32) -> Result<Option<u64>, KvmError> {
    Ok(read_all(vcpu, [index])?.map(|[value]| value))
}

/// The values of registers, if KVM has all of them.
pub fn read_all<const N: usize>(vcpu: &VcpuFd, indices: [u32; N]) -> Result<Option<[u64; N]>, KvmError> {
    let entries = indices.map(|index| kvm_msr_entry { index, ..Default::default() });
    let mut msrs = Msrs::from_entries(&entries).expect("a few entries fit");
    let read = vcpu.get_msrs(&mut msrs).doing("read the MSRs")?;
    let mut values = [0; N];
    for (value, entry) in values.iter_mut().zip(msrs.as_slice()) {
        *value = entry.data;
    }
    Ok((read == N).then_some(values))
}

/// Sets a register.
pub fn write(vcpu: &VcpuFd, index: u32, data: u64) -> Result<Written, KvmError> {
    let entry = kvm_msr_entry { index, data, ..Default::default() };
    let written =
        vcpu.set_msrs(&Msrs::from_entries(&[entry]).expect("one entry fits")).doing("set the MSRs")?;
    Ok(if written == 1 { Written::Yes } else { Written::No })
}
