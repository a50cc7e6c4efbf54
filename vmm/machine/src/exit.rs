//! Exits of a vCPU, as values that do not borrow from the pages that KVM shares with this process (`struct kvm_run`).

use std::fmt;
use std::ops::{Deref, DerefMut};

use devices::End;
use kvm_bindings::{
    KVM_EXIT_INTERNAL_ERROR, KVM_SYSTEM_EVENT_CRASH, KVM_SYSTEM_EVENT_RESET, KVM_SYSTEM_EVENT_SHUTDOWN,
    kvm_run,
};
use kvm_ioctls::{VcpuExit, VcpuFd};
use vpmu::state::Mismatch;

use crate::kvm_error::KvmError;

/// Why a vCPU has left its guest. `A` is the type of the exits that only one architecture has.
pub enum Exit<A> {
    /// The guest reads from a device's register in memory (MMIO). The next entry completes the read.
    MemoryRead {
        /// Guest-physical address of the register.
        address: u64,
        /// Number of bytes to read.
        width: usize,
    },
    /// The guest writes to a device's register in memory (MMIO).
    MemoryWrite {
        /// Guest-physical address of the register.
        address: u64,
        data: Bytes,
    },
    /// An exit that only this architecture has.
    Arch(A),
    /// A signal has arrived, or `immediate_exit` was set. The guest itself has not caused this exit.
    Interrupted,
    /// The guest has shut down or reset its machine through an interface that KVM implements.
    End(End),
    /// The vCPU cannot run any further.
    Fatal(Reason),
}

/// Kinds of exits, for statistics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExitKind {
    /// A read from an I/O port.
    PortRead,
    /// A write to an I/O port.
    PortWrite,
    /// A read from a device's register in memory.
    MemoryRead,
    /// A write to a device's register in memory.
    MemoryWrite,
    /// A read from a PMU register.
    PmuRead,
    /// A write to a PMU register.
    PmuWrite,
    Signal,
    Other,
}

/// Data of one access to a device, at most [`Bytes::MAX_LEN`] bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bytes {
    bytes: [u8; Self::MAX_LEN],
    len: usize,
}

impl Bytes {
    /// Maximum length of an access, as in `struct kvm_run`.
    pub const MAX_LEN: usize = 8;

    /// Returns `len` zeroes, but at most [`Self::MAX_LEN`].
    pub fn zeroes(len: usize) -> Self {
        Self { bytes: [0; Self::MAX_LEN], len: len.min(Self::MAX_LEN) }
    }

    /// Copies `data`, but at most its first [`Self::MAX_LEN`] bytes.
    pub fn copy_of(data: &[u8]) -> Self {
        let mut copy = Self::zeroes(data.len());
        let len = copy.len;
        copy.copy_from_slice(&data[..len]);
        copy
    }

    /// Returns the data, padded with zeroes.
    pub fn padded(self) -> [u8; Self::MAX_LEN] {
        self.bytes
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl DerefMut for Bytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.len]
    }
}

/// Why a vCPU cannot run any further.
#[derive(Debug)]
pub enum Reason {
    /// A triple fault: an exception occurred while the processor delivered a double fault.
    TripleFault,
    /// KVM reports an internal error (`KVM_EXIT_INTERNAL_ERROR`) with this suberror.
    InternalError(u32),
    /// The processor refused to enter the guest (`KVM_EXIT_FAIL_ENTRY`), for this hardware-specific reason.
    EntryFailed(u64),
    RunFailed(kvm_ioctls::Error),
    /// A KVM operation failed that the vCPU needs before it can enter the guest.
    Kvm(KvmError),
    /// The saved state of the PMU is not one of this PMU.
    Restore(Mismatch),
    /// An exit that a machine of Tally's should never cause.
    Unexpected(String),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TripleFault => write!(f, "triple fault"),
            Self::InternalError(kind) => {
                let what = match *kind {
                    kvm_bindings::KVM_INTERNAL_ERROR_EMULATION => "it cannot emulate an instruction",
                    kvm_bindings::KVM_INTERNAL_ERROR_SIMUL_EX => "two exceptions at once",
                    kvm_bindings::KVM_INTERNAL_ERROR_DELIVERY_EV => "it cannot deliver an event",
                    kvm_bindings::KVM_INTERNAL_ERROR_UNEXPECTED_EXIT_REASON => {
                        "an exit that it does not know"
                    }
                    _ => "unknown",
                };
                write!(f, "KVM internal error {kind}: {what}")
            }
            Self::EntryFailed(reason) => {
                write!(f, "KVM error: the processor refused to enter the guest ({reason:#x})")
            }
            Self::RunFailed(error) => write!(f, "KVM error: {error}"),
            Self::Kvm(error) => write!(f, "{error}"),
            Self::Restore(error) => write!(f, "{error}"),
            Self::Unexpected(exit) => write!(f, "KVM error: unexpected exit {exit}"),
        }
    }
}

impl<A> Exit<A> {
    /// Converts an exit that all architectures have. Returns `None` if `exit` itself does not have enough detail: call
    /// [`Self::from_kvm_run`] then.
    pub fn from_vcpu_exit(exit: &VcpuExit) -> Option<Self> {
        Some(match *exit {
            VcpuExit::Intr | VcpuExit::InternalError => return None,
            VcpuExit::MmioRead(address, ref data) => Self::MemoryRead { address, width: data.len() },
            VcpuExit::MmioWrite(address, data) => Self::MemoryWrite { address, data: Bytes::copy_of(data) },
            VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_SHUTDOWN, _) => Self::End(End::PowerOff),
            VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_RESET, _) => Self::End(End::Reboot),
            VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_CRASH, _) => {
                Self::Fatal(Reason::Unexpected("guest crash".into()))
            }
            VcpuExit::SystemEvent(other, _) => {
                Self::Fatal(Reason::Unexpected(format!("system event {other}")))
            }
            VcpuExit::Shutdown => Self::Fatal(Reason::TripleFault),
            VcpuExit::FailEntry(reason, _) => Self::Fatal(Reason::EntryFailed(reason)),
            ref other => Self::Fatal(Reason::Unexpected(format!("{other:?}"))),
        })
    }

    /// Converts an exit whose details are only in `struct kvm_run`: an internal error, or an exit that the guest has
    /// not caused.
    pub fn from_kvm_run(fd: &mut VcpuFd) -> Self {
        match fd.get_kvm_run() {
            run if run.exit_reason == KVM_EXIT_INTERNAL_ERROR => {
                Self::Fatal(Reason::InternalError(internal_error(run)))
            }
            _ => Self::Interrupted,
        }
    }

    /// Converts an error of `KVM_RUN`. EINTR means that a signal has arrived or that `immediate_exit` was set. EAGAIN
    /// asks for another call, for example because a vCPU that waited for its start was started.
    pub fn from_run_error(error: kvm_ioctls::Error) -> Self {
        match error.errno() {
            libc::EINTR | libc::EAGAIN => Self::Interrupted,
            _ => Self::Fatal(Reason::RunFailed(error)),
        }
    }
}

/// Completes a guest's read from a device's register in memory. KVM copies the data to the guest at the next entry.
pub fn complete_read(fd: &mut VcpuFd, data: Bytes) {
    fd.get_kvm_run().__bindgen_anon_1.mmio.data = data.padded();
}

fn internal_error(run: &kvm_run) -> u32 {
    // SAFETY: called for an internal error only, where the kernel has filled in this member of the union.
    unsafe { run.__bindgen_anon_1.internal.suberror }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_access_keeps_its_width_and_is_padded_with_zeroes() {
        let mut bytes = Bytes::copy_of(&[1, 2]);
        assert_eq!((&*bytes, bytes.padded()), (&[1, 2][..], [1, 2, 0, 0, 0, 0, 0, 0]));
        bytes[1] = 3;
        assert_eq!(*bytes, [1, 3]);
        assert_eq!((Bytes::zeroes(4).len(), Bytes::zeroes(9).len()), (4, Bytes::MAX_LEN));
    }
}
