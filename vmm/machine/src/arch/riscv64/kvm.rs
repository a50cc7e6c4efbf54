//! What KVM must be able to do here, and what it is called.

use kvm_ioctls::{Cap, Kvm};

use super::pmu::Choice;
use crate::kvm_error::Need;

/// What every machine needs.
pub const NEEDS: [Need; 6] = [
    Need::new(Cap::UserMemory, "KVM_CAP_USER_MEMORY", "the guest's memory"),
    Need::new(Cap::OneReg, "KVM_CAP_ONE_REG", "the vCPUs' registers"),
    Need::new(Cap::Irqchip, "KVM_CAP_IRQCHIP", "interrupt controllers (AIA)"),
    Need::new(Cap::DeviceCtrl, "KVM_CAP_DEVICE_CTRL", "setting them up"),
    Need::new(Cap::Ioeventfd, "KVM_CAP_IOEVENTFD", "requests to devices"),
    Need::new(Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT", "leaving the guest when a counter overflows"),
];

/// What is good to have.
pub const WANTED: [Need; 0] = [];

/// The modules that make KVM of a kernel, and what they stand on.
pub const MODULES: [(&str, &str); 1] = [("kvm", "on the processor's hypervisor extension")];

/// How such a module is loaded.
pub const LOADING: [&str; 1] = ["modprobe kvm"];

/// What a KVM must be able to do for this choice, beyond what every machine needs.
pub fn needs(_choice: Choice) -> &'static [Need] {
    &[]
}

/// What there is to say of KVM's own PMU.
pub fn of_its_own_pmu(_kvm: &Kvm) -> &'static str {
    "KVM's own PMU is switched off for each guest"
}
