//! KVM capabilities that Tally needs on x86, and the names of KVM's modules.

use kvm_bindings::KVM_CAP_PMU_CAPABILITY;
use kvm_ioctls::{Cap, Kvm};

use super::pmu::Choice;
use crate::kvm_error::Need;

/// Capabilities that every machine needs.
pub const NEEDS: [Need; 11] = [
    Need::new(Cap::Irqchip, "KVM_CAP_IRQCHIP", "interrupt controllers"),
    Need::new(Cap::UserMemory, "KVM_CAP_USER_MEMORY", "the guest's memory"),
    Need::new(Cap::SetTssAddr, "KVM_CAP_SET_TSS_ADDR", "real mode on Intel's processors"),
    Need::new(Cap::SetIdentityMapAddr, "KVM_CAP_SET_IDENTITY_MAP_ADDR", "real mode on Intel's processors"),
    Need::new(Cap::Pit2, "KVM_CAP_PIT2", "the timer of PCs"),
    Need::new(Cap::Irqfd, "KVM_CAP_IRQFD", "interrupts of devices"),
    Need::new(Cap::Ioeventfd, "KVM_CAP_IOEVENTFD", "requests to devices"),
    Need::new(Cap::ExtCpuid, "KVM_CAP_EXT_CPUID", "what the guest sees of its processor"),
    Need::new(Cap::TscDeadlineTimer, "KVM_CAP_TSC_DEADLINE_TIMER", "the timer of each vCPU"),
    Need::new(Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT", "leaving the guest when a counter overflows"),
    Need::new(Cap::SignalMsi, "KVM_CAP_SIGNAL_MSI", "the interrupt of an overflow"),
];

/// Capabilities that a machine with an emulated PMU, or without a PMU, needs in addition.
const PMU_NEEDS: [Need; 3] = [
    Need::new(Cap::X86UserSpaceMsr, "KVM_CAP_X86_USER_SPACE_MSR", "the PMU's registers"),
    Need::new(Cap::X86MsrFilter, "KVM_CAP_X86_MSR_FILTER", "handing over no other registers"),
    Need::new(Cap::SyncRegs, "KVM_CAP_SYNC_REGS", "where the guest is at an overflow, for its log"),
];

/// Optional capability that makes the console faster.
pub const WANTED: [Need; 1] = [Need::new(Cap::CoalescedPio, "KVM_CAP_COALESCED_PIO", "a faster console")];

/// Kernel modules that provide KVM, and what each of them is based on.
pub const MODULES: [(&str, &str); 3] = [
    ("kvm_amd", "on the processor's virtualisation"),
    ("kvm_intel", "on the processor's virtualisation"),
    ("kvm_pvm", "in software only"),
];

/// Commands that load these modules.
pub const LOADING: [&str; 2] = ["modprobe kvm-amd", "modprobe kvm-intel"];

/// Returns the capabilities that this choice of a PMU needs in addition to [`NEEDS`].
pub fn needs(choice: Choice) -> &'static [Need] {
    match choice {
        Choice::Kvm => &[],
        _ => &PMU_NEEDS,
    }
}

/// Returns a sentence on whether KVM's own PMU can be switched off.
pub fn of_its_own_pmu(kvm: &Kvm) -> &'static str {
    if kvm.check_extension_raw(KVM_CAP_PMU_CAPABILITY.into()) > 0 {
        "KVM_CAP_PMU_CAPABILITY is there: KVM's own PMU is switched off for each guest"
    } else {
        "KVM_CAP_PMU_CAPABILITY is not there: KVM's own PMU is off, or KVM is older than Linux 5.18"
    }
}
