//! System calls and `ioctl` requests of RISC-V hosts, for the sandbox.

/// What the kernel calls this architecture (`linux/audit.h`).
pub const AUDIT_ARCH: u32 = 0xc000_00f3;
/// `KVM_RUN`.
pub const KVM_RUN: u32 = 0xae80;
/// Other requests of a vCPU's thread while the guest runs (`linux/kvm.h`).
pub const VCPU: &[u32] = &[
    0x4010_aeab, // KVM_GET_ONE_REG
    0x4010_aeac, // KVM_SET_ONE_REG
    0x4020_aea5, // KVM_SIGNAL_MSI
    0x4018_aee1, // KVM_SET_DEVICE_ATTR, instead of it on hosts with few interrupt identities
    0x4018_aee2, // KVM_GET_DEVICE_ATTR
];
/// Of these, what is asked at overflows, to interrupt the guest.
pub const AT_OVERFLOWS: &[u32] = &[
    0x4010_aeab, // KVM_GET_ONE_REG
    0x4010_aeac, // KVM_SET_ONE_REG
    0x4020_aea5, // KVM_SIGNAL_MSI
];
/// What a vCPU's thread also reads when the machine is saved.
pub const SAVE_VCPU: &[u32] = &[
    0x8004_ae98, // KVM_GET_MP_STATE
    0xc008_aeb0, // KVM_GET_REG_LIST
];
/// What is read of the machine when it is saved.
pub const SAVE: &[u32] = &[
    0x4018_aee2, // KVM_GET_DEVICE_ATTR, of the interrupt controller
];
/// What is asked of KVM about the processor that guests see: nothing, as the vCPUs' registers tell.
pub const FINGERPRINT: &[u32] = &[];

// Calls that older architectures have beside these.
pub const POLL: &[i64] = &[];
pub const RENAME: &[i64] = &[];
pub const UNLINK: &[i64] = &[];

/// Returns the request of an `ioctl` that a signal has interrupted: its second argument, in register a1.
pub fn ioctl_request(context: &libc::ucontext_t) -> u32 {
    const A1: usize = 11;
    u32::try_from(context.uc_mcontext.__gregs[A1] & 0xffff_ffff).unwrap_or(0)
}
