//! KVM capabilities that Tally needs on x86, and the names of KVM's modules.

use kvm_ioctls::Cap;

use crate::architecture::KvmRequirements;
use crate::kvm_error::Capability;

/// What machines need from KVM.
pub const REQUIREMENTS: KvmRequirements = KvmRequirements {
    required: &REQUIRED,
    optional: &[Capability::new(Cap::CoalescedPio, "KVM_CAP_COALESCED_PIO", "a faster console")],
    modules: &[
        ("kvm_amd", "on the processor's virtualisation"),
        ("kvm_intel", "on the processor's virtualisation"),
        ("kvm_pvm", "in software only"),
    ],
    modprobe: &["modprobe kvm-amd", "modprobe kvm-intel"],
};

const REQUIRED: [Capability; 11] = [
    Capability::new(Cap::Irqchip, "KVM_CAP_IRQCHIP", "interrupt controllers"),
    Capability::new(Cap::UserMemory, "KVM_CAP_USER_MEMORY", "the guest's memory"),
    Capability::new(Cap::SetTssAddr, "KVM_CAP_SET_TSS_ADDR", "real mode on Intel's processors"),
    Capability::new(
        Cap::SetIdentityMapAddr,
        "KVM_CAP_SET_IDENTITY_MAP_ADDR",
        "real mode on Intel's processors",
    ),
    Capability::new(Cap::Pit2, "KVM_CAP_PIT2", "the timer of PCs"),
    Capability::new(Cap::Irqfd, "KVM_CAP_IRQFD", "interrupts of devices"),
    Capability::new(Cap::Ioeventfd, "KVM_CAP_IOEVENTFD", "requests to devices"),
    Capability::new(Cap::ExtCpuid, "KVM_CAP_EXT_CPUID", "what the guest sees of its processor"),
    Capability::new(Cap::TscDeadlineTimer, "KVM_CAP_TSC_DEADLINE_TIMER", "the timer of each vCPU"),
    Capability::new(
        Cap::ImmediateExit,
        "KVM_CAP_IMMEDIATE_EXIT",
        "leaving the guest when a counter overflows",
    ),
    Capability::new(Cap::SignalMsi, "KVM_CAP_SIGNAL_MSI", "the interrupt of an overflow"),
];

/// Capabilities that a machine with an emulated PMU, or without a PMU, needs in addition.
pub const PMU_REQUIRED: [Capability; 3] = [
    Capability::new(Cap::X86UserSpaceMsr, "KVM_CAP_X86_USER_SPACE_MSR", "the PMU's registers"),
    Capability::new(Cap::X86MsrFilter, "KVM_CAP_X86_MSR_FILTER", "handing over no other registers"),
    Capability::new(
        Cap::SyncRegs,
        "KVM_CAP_SYNC_REGS",
        "an overflow's NMI, and where the guest is, for its log",
    ),
];
