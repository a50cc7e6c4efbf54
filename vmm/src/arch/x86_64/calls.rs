//! System calls and `ioctl` requests of x86-64 hosts, for the sandbox.

/// What the kernel calls this architecture (`linux/audit.h`).
pub const AUDIT_ARCH: u32 = 0xc000_003e;
/// `KVM_RUN`.
pub const KVM_RUN: u32 = 0xae80;
/// Other requests of a vCPU's thread while the guest runs (`linux/kvm.h`): reading registers and the local APIC,
/// setting MSRs, interrupts (MSIs), coalesced writes to the console, and telling the guest's clock of a pause.
pub const VCPU: &[u32] = &[
    0x4010_ae67, // KVM_REGISTER_COALESCED_MMIO
    0x4010_ae68, // KVM_UNREGISTER_COALESCED_MMIO
    0x8090_ae81, // KVM_GET_REGS
    0x8138_ae83, // KVM_GET_SREGS
    0xc008_ae88, // KVM_GET_MSRS
    0x4008_ae89, // KVM_SET_MSRS
    0x8400_ae8e, // KVM_GET_LAPIC
    0x4020_aea5, // KVM_SIGNAL_MSI
    0xaead,      // KVM_KVMCLOCK_CTRL
];
/// Of these, what is asked at overflows: none, as the interrupt is in `struct kvm_run`.
pub const AT_OVERFLOWS: &[u32] = &[];
/// What a vCPU's thread also reads when the machine is saved.
pub const SAVE_VCPU: &[u32] = &[
    0x8004_ae98, // KVM_GET_MP_STATE
    0x8040_ae9f, // KVM_GET_VCPU_EVENTS
    0x8080_aea1, // KVM_GET_DEBUGREGS
    0xaea3,      // KVM_GET_TSC_KHZ
    0x9000_aea4, // KVM_GET_XSAVE
    0x8188_aea6, // KVM_GET_XCRS
];
/// What is read of the machine when it is saved.
pub const SAVE: &[u32] = &[
    0xc208_ae62, // KVM_GET_IRQCHIP
    0x8030_ae7c, // KVM_GET_CLOCK
    0x8070_ae9f, // KVM_GET_PIT2
];
/// What is asked of KVM about the processor that guests see.
pub const FINGERPRINT: &[u32] = &[
    0xc004_ae02, // KVM_GET_MSR_INDEX_LIST
    0xae03,      // KVM_CHECK_EXTENSION
    0xc008_ae05, // KVM_GET_SUPPORTED_CPUID
];

// The C library uses these where newer architectures have only one call with more arguments.
pub const POLL: &[i64] = &[libc::SYS_poll];
pub const RENAME: &[i64] = &[libc::SYS_rename, libc::SYS_renameat];
pub const UNLINK: &[i64] = &[libc::SYS_unlink];

/// Returns the request of an `ioctl` that a signal has interrupted: its second argument.
pub fn ioctl_request(context: &libc::ucontext_t) -> u32 {
    let argument = usize::try_from(libc::REG_RSI).map_or(0, |number| context.uc_mcontext.gregs[number]);
    u32::try_from(argument & 0xffff_ffff).unwrap_or(0)
}
