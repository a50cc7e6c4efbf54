//! How times and sets of counters are shown, in the list of records and in the summary.

use std::fmt;
use std::time::Duration;

pub fn counters(set: u64) -> impl Iterator<Item = u8> {
    (0..64).filter(move |counter| set & 1 << counter != 0)
}

/// A time to the nanosecond.
pub struct Seconds(pub Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:09}", self.0.as_secs(), self.0.subsec_nanos())
    }
}
