//! How a promise is found broken.

use std::fmt::Debug;
use std::io;

/// What a feature says of itself: a line of what it saw, or what is wrong.
pub type Verdict = Result<String, Failure>;

#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error("cannot {action}: {source}")]
    System { action: String, source: io::Error },
    #[error("{0}")]
    Unknown(&'static str),
    #[error("{what}: {found}, not {expected}")]
    Wrong { what: String, found: String, expected: String },
}

impl Failure {
    /// The last system call's failure.
    pub fn last(action: impl Into<String>) -> Self {
        Self::System { action: action.into(), source: io::Error::last_os_error() }
    }
}

/// The result of a system call that says -1 when it fails.
pub fn checked(action: &str, result: impl Into<i64>) -> Result<i64, Failure> {
    match result.into() {
        -1 => Err(Failure::last(action)),
        result => Ok(result),
    }
}

/// Demands that what was found is what was promised.
#[expect(clippy::needless_pass_by_value, reason = "demands read better without references")]
pub fn equal<T: PartialEq + Debug>(what: &str, found: T, expected: T) -> Result<(), Failure> {
    if found == expected {
        return Ok(());
    }
    let (found, expected) = (format!("{found:?}"), format!("{expected:?}"));
    Err(Failure::Wrong { what: what.to_owned(), found, expected })
}

/// Demands that a number is one of these.
pub fn within(
    what: &str,
    found: u64,
    expected: impl std::ops::RangeBounds<u64> + Debug,
) -> Result<(), Failure> {
    if expected.contains(&found) {
        return Ok(());
    }
    let (found, expected) = (found.to_string(), format!("in {expected:?}"));
    Err(Failure::Wrong { what: what.to_owned(), found, expected })
}
