//! System calls and `ioctl` requests of x86-64 hosts, for the sandbox.

/// `KVM_RUN`.
pub const KVM_RUN: u32 = 0xae80;
/// Other requests of a vCPU's thread while the guest runs (`linux/kvm.h`): reading registers and the local APIC, setting
/// MSRs, interrupts (MSIs), and telling the guest's clock of a pause.
pub const VCPU: &[u16] = &[
    0xae81, // KVM_GET_REGS
    0xae83, // KVM_GET_SREGS
    0xae88, // KVM_GET_MSRS
    0xae89, // KVM_SET_MSRS
    0xae8e, // KVM_GET_LAPIC
    0xaea5, // KVM_SIGNAL_MSI
    0xaead, // KVM_KVMCLOCK_CTRL
];
/// Requests by which a device interrupts the guest: none, as it writes to an eventfd.
pub const INTERRUPT: &[u16] = &[];

// The C library uses these where newer architectures have only one call with more arguments.
pub const POLL: &[i64] = &[libc::SYS_poll];
pub const EPOLL_WAIT: &[i64] = &[libc::SYS_epoll_wait];
pub const RENAME: &[i64] = &[libc::SYS_rename, libc::SYS_renameat];
pub const UNLINK: &[i64] = &[libc::SYS_unlink];
