//! What KVM must be able to do, and what it says when it cannot.

use std::io;

use kvm_ioctls::Cap;

/// KVM's interface has had this version since 2007.
pub const API_VERSION: i32 = 12;

/// Something that a KVM must be able to do.
pub struct Need {
    /// KVM's name for it.
    pub cap: Cap,
    /// The same in its documentation.
    pub name: &'static str,
    /// What it is for.
    pub purpose: &'static str,
}

impl Need {
    /// A need.
    pub const fn new(cap: Cap, name: &'static str, purpose: &'static str) -> Self {
        Self { cap, name, purpose }
    }
}

/// What KVM refused.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    /// There is no KVM.
    #[error("no /dev/kvm: this host has no KVM, or its module is not loaded ({loading})")]
    Absent {
        /// The commands that load the module.
        loading: String,
    },
    /// It is not for this user.
    #[error(
        "/dev/kvm: permission denied: join the group that owns it (`sudo usermod -aG kvm $USER`, then log in again)"
    )]
    Forbidden,
    /// It cannot be opened for another reason.
    #[error("/dev/kvm: {0}")]
    Open(io::Error),
    /// Not the interface that we know.
    #[error("/dev/kvm speaks version {0} of its interface, not {API_VERSION}")]
    Version(i32),
    /// It lacks something.
    #[error("this host's KVM lacks {0}")]
    Lacks(String),
    /// More CPUs than it can give.
    #[error("--cpus {asked}: this host's KVM allows 1 to {most}")]
    Cpus {
        /// What was asked for.
        asked: u32,
        /// The most there can be.
        most: u32,
    },
    /// An operation failed.
    #[error("KVM cannot {what}: {source}")]
    Operation {
        /// What was tried.
        what: &'static str,
        /// What KVM said.
        source: kvm_ioctls::Error,
    },
}

/// Gives a failed KVM operation its name.
pub trait Doing<T> {
    /// `what` completes the sentence "KVM cannot ...".
    fn doing(self, what: &'static str) -> Result<T, KvmError>;
}

impl<T> Doing<T> for Result<T, kvm_ioctls::Error> {
    fn doing(self, what: &'static str) -> Result<T, KvmError> {
        self.map_err(|source| KvmError::Operation { what, source })
    }
}
