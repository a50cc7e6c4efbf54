//! Errors of building a machine.

use devices::{DeviceError, Mismatch, Overlap};

use crate::kvm_error::KvmError;
use crate::loader::error::LoadError;

/// Why a machine cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// A KVM operation failed.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// The kernel cannot be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// Two devices would have overlapping addresses.
    #[error(transparent)]
    Bus(#[from] Overlap),
    /// An eventfd cannot be created, for example because too many files are open.
    #[error("cannot make an eventfd: {0}")]
    Event(std::io::Error),
    /// The saved state is not one of this machine.
    #[error(transparent)]
    Restore(Mismatch),
    /// A device's saved state is not one of this machine.
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("cannot write the firmware: {0}")]
    Firmware(String),
}
