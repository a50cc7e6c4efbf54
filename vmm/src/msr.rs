//! One model-specific register of a vCPU at a time, as KVM has it.

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
    let mut msrs = one(index, 0);
    let read = vcpu.get_msrs(&mut msrs).doing("read the MSRs")?;
    Ok(msrs.as_slice()[..read].first().map(|entry| entry.data))
}

/// Sets a register.
pub fn write(vcpu: &VcpuFd, index: u32, data: u64) -> Result<Written, KvmError> {
    let written = vcpu.set_msrs(&one(index, data)).doing("set the MSRs")?;
    Ok(if written == 1 { Written::Yes } else { Written::No })
}

fn one(index: u32, data: u64) -> Msrs {
    Msrs::from_entries(&[kvm_msr_entry { index, data, ..Default::default() }]).expect("one entry fits")
}
