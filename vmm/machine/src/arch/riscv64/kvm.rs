//! The KVM capabilities that Tally needs on RISC-V, and KVM's modules.

use kvm_ioctls::{Cap, Kvm};

use super::pmu::Choice;
use crate::kvm_error::Need;

/// KVM capabilities that every machine needs.
pub const NEEDS: [Need; 6] = [
    Need::new(Cap::UserMemory, "KVM_CAP_USER_MEMORY", "the guest's memory"),
    Need::new(Cap::OneReg, "KVM_CAP_ONE_REG", "the vCPUs' registers"),
    Need::new(Cap::Irqchip, "KVM_CAP_IRQCHIP", "interrupt controllers (AIA)"),
    Need::new(Cap::DeviceCtrl, "KVM_CAP_DEVICE_CTRL", "setting them up"),
    Need::new(Cap::Ioeventfd, "KVM_CAP_IOEVENTFD", "requests to devices"),
    Need::new(Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT", "leaving the guest when a counter overflows"),
];

/// KVM capabilities that are used if KVM has them.
pub const WANTED: [Need; 0] = [];

/// KVM's kernel modules, each with a phrase for the user that says on what its KVM runs.
pub const MODULES: [(&str, &str); 1] = [("kvm", "on the processor's hypervisor extension")];

/// Commands that load a KVM module.
pub const LOADING: [&str; 1] = ["modprobe kvm"];

/// Returns the KVM capabilities that a machine with this PMU needs beyond [`NEEDS`].
pub fn needs(_choice: Choice) -> &'static [Need] {
    &[]
}

/// Returns a sentence for the user about the state of KVM's own PMU.
pub fn of_its_own_pmu(_kvm: &Kvm) -> &'static str {
    "KVM's own PMU is switched off for each guest"
}
