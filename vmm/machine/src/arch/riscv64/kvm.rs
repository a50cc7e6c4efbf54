//! The KVM capabilities that Tally needs on RISC-V, and KVM's modules.

use kvm_ioctls::Cap;

use crate::architecture::KvmRequirements;
use crate::kvm_error::Capability;

/// What machines need from KVM.
pub const REQUIREMENTS: KvmRequirements = KvmRequirements {
    required: &[
        Capability::new(Cap::UserMemory, "KVM_CAP_USER_MEMORY", "the guest's memory"),
        Capability::new(Cap::OneReg, "KVM_CAP_ONE_REG", "the vCPUs' registers"),
        Capability::new(Cap::Irqchip, "KVM_CAP_IRQCHIP", "interrupt controllers (AIA)"),
        Capability::new(Cap::DeviceCtrl, "KVM_CAP_DEVICE_CTRL", "setting them up"),
        Capability::new(Cap::Ioeventfd, "KVM_CAP_IOEVENTFD", "requests to devices"),
        Capability::new(
            Cap::ImmediateExit,
            "KVM_CAP_IMMEDIATE_EXIT",
            "leaving the guest when a counter overflows",
        ),
    ],
    optional: &[],
    modules: &[("kvm", "on the processor's hypervisor extension")],
    modprobe: &["modprobe kvm"],
};
