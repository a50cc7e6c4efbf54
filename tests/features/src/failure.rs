//! Results of checks.

use std::fmt::Debug;
use std::io;

/// Result of checking a feature: a line that says what was measured, or what is wrong.
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
    /// Returns the error of the last system call (`errno`).
    pub fn last(action: impl Into<String>) -> Self {
        Self::System { action: action.into(), source: io::Error::last_os_error() }
    }
}

/// Returns the result of a system call, or the error in `errno` if it returned -1.
pub fn checked(action: &str, result: impl Into<i64>) -> Result<i64, Failure> {
    match result.into() {
        -1 => Err(Failure::last(action)),
        result => Ok(result),
    }
}

/// Returns an error unless `found` equals `expected`.
#[expect(clippy::needless_pass_by_value, reason = "the calls read better without references")]
pub fn equal<T: PartialEq + Debug>(what: &str, found: T, expected: T) -> Result<(), Failure> {
    if found == expected {
        return Ok(());
    }
    let (found, expected) = (format!("{found:?}"), format!("{expected:?}"));
    Err(Failure::Wrong { what: what.to_owned(), found, expected })
}

/// Returns an error unless `found` is in the range `expected`.
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
