//! Why a machine cannot be built.

use devices::Overlap;

use crate::kvm_error::KvmError;
use crate::loader::error::LoadError;

/// A machine that cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// KVM refused something.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// The kernel cannot be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// Two devices at one place.
    #[error(transparent)]
    Bus(#[from] Overlap),
    /// The host is out of files.
    #[error("cannot make an eventfd: {0}")]
    Event(std::io::Error),
    /// Or of threads.
    #[error("cannot start a device's thread: {0}")]
    Thread(std::io::Error),
    /// The guest's memory does not hold what its kernel is to be told.
    #[error("cannot write the firmware: {0}")]
    Firmware(String),
}
