//! KVM capabilities that Tally needs, and errors of KVM.

use std::io;

use kvm_ioctls::Cap;

/// Version of KVM's API. It has not changed since 2007.
pub const API_VERSION: i32 = 12;

/// A KVM capability that Tally needs or can use.
pub struct Capability {
    pub cap: Cap,
    /// Name of the capability in KVM's documentation.
    pub name: &'static str,
    /// What Tally needs it for.
    pub purpose: &'static str,
}

impl Capability {
    /// Creates a description of a capability.
    pub const fn new(cap: Cap, name: &'static str, purpose: &'static str) -> Self {
        Self { cap, name, purpose }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    #[error("no /dev/kvm: this host has no KVM, or its module is not loaded ({modprobe})")]
    Absent {
        /// Commands that load a KVM module.
        modprobe: String,
    },
    #[error(
        "/dev/kvm: permission denied: join the group that owns it (`sudo usermod -aG kvm $USER`, then log in again)"
    )]
    Forbidden,
    #[error("/dev/kvm: {0}")]
    Open(io::Error),
    /// KVM has another API version than [`API_VERSION`].
    #[error("/dev/kvm speaks version {0} of its interface, not {API_VERSION}")]
    Version(i32),
    #[error("this host's KVM lacks {0}")]
    Lacks(String),
    #[error("--cpus {requested}: this host's KVM allows 1 to {max}")]
    Cpus { requested: u32, max: u32 },
    /// A vCPU cannot be saved at this moment (RISC-V).
    #[error("the guest is starting a vCPU, and KVM does not show where: try again")]
    Starting,
    /// An operation failed.
    #[error("KVM cannot {what}: {source}")]
    Operation {
        /// The operation. Completes the sentence "KVM cannot ...".
        what: &'static str,
        source: kvm_ioctls::Error,
    },
}

/// Adds the operation to a result of KVM.
pub trait KvmResultExt<T> {
    /// Names the operation. `what` completes the sentence "KVM cannot ...".
    fn operation(self, what: &'static str) -> Result<T, KvmError>;
}

impl<T> KvmResultExt<T> for Result<T, kvm_ioctls::Error> {
    fn operation(self, what: &'static str) -> Result<T, KvmError> {
        self.map_err(|source| KvmError::Operation { what, source })
    }
}
