//! Errors of states that were saved.

/// A saved state is not one of this machine's device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the saved {0} cannot be one of this device")]
pub struct Mismatch(pub &'static str);

/// Returns an error unless something holds of what was saved.
pub(crate) fn check(holds: bool, what: &'static str) -> Result<(), Mismatch> {
    if holds { Ok(()) } else { Err(Mismatch(what)) }
}
