//! Why a vCPU has left its guest, as values of our own: nothing in here borrows the pages that KVM shares with this process.

use std::fmt;
use std::ops::{Deref, DerefMut};

use devices::End;
use kvm_bindings::{
    KVM_EXIT_INTERNAL_ERROR, KVM_SYSTEM_EVENT_CRASH, KVM_SYSTEM_EVENT_RESET, KVM_SYSTEM_EVENT_SHUTDOWN,
    kvm_run,
};
use kvm_ioctls::{VcpuExit, VcpuFd};

use crate::kvm_error::KvmError;

/// Why a vCPU has left its guest. `A` are the exits that only one architecture has.
pub enum Exit<A> {
    /// The guest reads a device's register in memory, and waits for the answer.
    MemoryRead {
        /// Its physical address.
        address: u64,
        /// How many bytes it reads.
        width: usize,
    },
    /// The guest writes to a device's register in memory.
    MemoryWrite {
        /// Its physical address.
        address: u64,
        /// What it writes.
        data: Bytes,
    },
    /// What only this architecture has.
    Own(A),
    /// A signal has arrived, or the next entry was to return at once.
    CalledOut,
    /// The guest has asked KVM itself for the end of its machine.
    End(End),
    /// The guest cannot go on.
    Dead(Reason),
}

/// What an exit is counted as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A read from an I/O port.
    PortRead,
    /// A write to one.
    PortWrite,
    /// A read of a device's register in memory.
    MemoryRead,
    /// A write to one.
    MemoryWrite,
    /// A read of a register of the PMU's.
    PmuRead,
    /// A write to one.
    PmuWrite,
    /// A signal.
    Signal,
    /// Anything else.
    Other,
}

/// The data of one access: up to 8 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bytes {
    bytes: [u8; Self::MOST],
    len: usize,
}

impl Bytes {
    /// An access is of at most so many.
    pub const MOST: usize = 8;

    /// Returns so many zeroes, or as many as there can be.
    pub fn zeroes(len: usize) -> Self {
        Self { bytes: [0; Self::MOST], len: len.min(Self::MOST) }
    }

    /// Returns a copy of these, or of as many as there can be.
    pub fn copy_of(data: &[u8]) -> Self {
        let mut copy = Self::zeroes(data.len());
        let len = copy.len;
        copy.copy_from_slice(&data[..len]);
        copy
    }

    /// Returns them with zeroes behind.
    pub fn padded(self) -> [u8; Self::MOST] {
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

/// Why a vCPU cannot go on.
#[derive(Debug)]
pub enum Reason {
    /// A fault while handling a fault while handling a fault.
    TripleFault,
    /// KVM met something that it cannot emulate.
    InternalError(u32),
    /// The processor refused to enter the guest.
    EntryFailed(u64),
    /// `KVM_RUN` itself failed.
    RunFailed(kvm_ioctls::Error),
    /// Something that must be done before it goes on cannot be done.
    Refused(KvmError),
    /// An exit that no machine of ours causes.
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
            Self::Refused(error) => write!(f, "{error}"),
            Self::Unexpected(exit) => write!(f, "KVM error: unexpected exit {exit}"),
        }
    }
}

impl<A> Exit<A> {
    /// Returns an exit that all architectures have; none for one that says by itself too little ([`Self::rare`]).
    pub fn common(exit: &VcpuExit) -> Option<Self> {
        Some(match *exit {
            VcpuExit::Intr | VcpuExit::InternalError => return None,
            VcpuExit::MmioRead(address, ref data) => Self::MemoryRead { address, width: data.len() },
            VcpuExit::MmioWrite(address, data) => Self::MemoryWrite { address, data: Bytes::copy_of(data) },
            VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_SHUTDOWN, _) => Self::End(End::PowerOff),
            VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_RESET, _) => Self::End(End::Reboot),
            VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_CRASH, _) => {
                Self::Dead(Reason::Unexpected("guest crash".into()))
            }
            VcpuExit::SystemEvent(other, _) => {
                Self::Dead(Reason::Unexpected(format!("system event {other}")))
            }
            VcpuExit::Shutdown => Self::Dead(Reason::TripleFault),
            VcpuExit::FailEntry(reason, _) => Self::Dead(Reason::EntryFailed(reason)),
            ref other => Self::Dead(Reason::Unexpected(format!("{other:?}"))),
        })
    }

    /// Returns what the pages that KVM shares for a vCPU say of an exit.
    pub fn rare(fd: &mut VcpuFd) -> Self {
        match fd.get_kvm_run() {
            run if run.exit_reason == KVM_EXIT_INTERNAL_ERROR => {
                Self::Dead(Reason::InternalError(internal_error(run)))
            }
            _ => Self::CalledOut,
        }
    }

    /// Returns what it means that `KVM_RUN` failed.
    pub fn failed(error: kvm_ioctls::Error) -> Self {
        match error.errno() {
            libc::EINTR | libc::EAGAIN => Self::CalledOut,
            _ => Self::Dead(Reason::RunFailed(error)),
        }
    }
}

/// Gives the guest what it reads from a device's register in memory. KVM takes it from there at the next entry.
pub fn answer_memory(fd: &mut VcpuFd, data: Bytes) {
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
    fn an_access_has_its_own_width_and_zeroes_behind() {
        let mut bytes = Bytes::copy_of(&[1, 2]);
        assert_eq!((&*bytes, bytes.padded()), (&[1, 2][..], [1, 2, 0, 0, 0, 0, 0, 0]));
        bytes[1] = 3;
        assert_eq!(*bytes, [1, 3]);
        assert_eq!((Bytes::zeroes(4).len(), Bytes::zeroes(9).len()), (4, Bytes::MOST));
    }
}
