//! Errors of saving devices, and of states that were saved.

use std::path::PathBuf;

/// A device cannot be saved or restored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The state is another device's.
    #[error(transparent)]
    Mismatch(#[from] Mismatch),
    /// A file of a share has no name any more, so it could not be opened again.
    #[error("the guest has {} of a share open, which is not there any more", .0.display())]
    Nameless(PathBuf),
    /// A file of a share cannot be opened again.
    #[error("the guest has {} of a share open, and here it cannot be opened: {why}", path.display())]
    Unopened {
        /// Its path in the share.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// A disk cannot be looked at.
    #[error("a disk: {0}")]
    Disk(String),
    /// A disk has been written since it was saved.
    #[error("a disk has changed since the guest was saved")]
    Changed,
}

/// A saved state is not one of this machine's device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the saved {0} cannot be one of this device")]
pub struct Mismatch(pub &'static str);

/// Returns an error unless something holds of what was saved.
pub(crate) fn check(holds: bool, what: &'static str) -> Result<(), Mismatch> {
    if holds { Ok(()) } else { Err(Mismatch(what)) }
}
