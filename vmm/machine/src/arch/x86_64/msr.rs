//! Model-specific registers of a vCPU, as KVM has them.

use kvm_bindings::{Msrs, kvm_msr_entry};
use kvm_ioctls::VcpuFd;

use crate::kvm_error::{Doing, KvmError};

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
    ask(vcpu, &mut question(index))
}

/// The question for a register's value, for whoever asks it often.
pub fn question(index: u32) -> Msrs {
    let entry = kvm_msr_entry { index, ..Default::default() };
    Msrs::from_entries(&[entry]).expect("one entry fits")
}

/// The answer to it, if KVM has the register.
pub fn ask(vcpu: &VcpuFd, question: &mut Msrs) -> Result<Option<u64>, KvmError> {
    let read = vcpu.get_msrs(question).doing("read the MSRs")?;
    Ok(question.as_slice().first().filter(|_| read == 1).map(|entry| entry.data))
}

/// Sets a register.
pub fn write(vcpu: &VcpuFd, index: u32, data: u64) -> Result<Written, KvmError> {
    let entry = kvm_msr_entry { index, data, ..Default::default() };
    let written =
        vcpu.set_msrs(&Msrs::from_entries(&[entry]).expect("one entry fits")).doing("set the MSRs")?;
    Ok(if written == 1 { Written::Yes } else { Written::No })
}
