//! Functions, flags and errors of the SBI PMU extension (SBI specification, chapter 11, and for the errors "Binary
//! Encoding").

use crate::event::Filter;

/// "Get number of counters".
pub const NUM_COUNTERS: u64 = 0;
/// "Get details of a counter".
pub const GET_INFO: u64 = 1;
/// "Find and configure a matching counter".
pub const CONFIG_MATCHING: u64 = 2;
/// "Start a set of counters".
pub const START: u64 = 3;
/// "Stop a set of counters".
pub const STOP: u64 = 4;
/// "Read a firmware counter".
pub const FIRMWARE_READ: u64 = 5;
/// "Read a firmware counter high bits".
pub const FIRMWARE_READ_HIGH: u64 = 6;
/// "Get Event info".
pub const EVENT_GET_INFO: u64 = 8;

/// What an SBI call returns (`struct sbiret`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// The error code, for `a0`: 0 for success.
    pub error: i64,
    /// The value, for `a1`.
    pub value: u64,
}

impl Answer {
    /// There is no such call.
    pub const NOT_SUPPORTED: Self = Self { error: Error::NotSupported as i64, value: 0 };
}

/// Why an SBI call fails, with the SBI's error codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Error {
    /// There is no such function, or no counter for the event.
    NotSupported = -2,
    /// There is no such counter, or no such flag.
    InvalidParameter = -3,
    /// A counter of the set was already started.
    AlreadyStarted = -7,
    /// A counter of the set was already stopped.
    AlreadyStopped = -8,
    /// There is no shared memory for snapshots.
    NoSharedMemory = -9,
}

impl From<Result<u64, Error>> for Answer {
    fn from(result: Result<u64, Error>) -> Self {
        match result {
            Ok(value) => Self { error: 0, value },
            Err(error) => Self { error: error as i64, value: 0 },
        }
    }
}

/// The flags of [`CONFIG_MATCHING`]. Reserved flags are ignored.
#[derive(Debug, Clone, Copy)]
pub struct Config(pub u64);

impl Config {
    /// `SKIP_MATCH`: the first counter of the set is configured, in use or not.
    pub fn skips_match(self) -> bool {
        self.has(0)
    }

    /// `CLEAR_VALUE`: the counter is set to 0.
    pub fn clears_value(self) -> bool {
        self.has(1)
    }

    /// `AUTO_START`: the counter is started.
    pub fn starts(self) -> bool {
        self.has(2)
    }

    /// Returns the privilege levels at which the counter counts: U mode unless `SET_UINH`, S mode unless `SET_SINH`.
    /// The guest has neither M mode (bit 7) nor VU and VS modes (bits 3 and 4).
    pub fn filter(self) -> Option<Filter> {
        Filter::of(!self.has(5), !self.has(6))
    }

    fn has(self, bit: u32) -> bool {
        self.0 & 1 << bit != 0
    }
}

/// Returns whether the flags of [`START`] set the counters to an initial value.
pub fn start_flags(flags: u64) -> Result<bool, Error> {
    first_flag(flags)
}

/// Returns whether the flags of [`STOP`] reset the counters, which then have no event.
pub fn stop_flags(flags: u64) -> Result<bool, Error> {
    first_flag(flags)
}

/// Returns the first flag. [`START`] and [`STOP`] have one flag of their own, and a second one for snapshots in shared
/// memory.
fn first_flag(flags: u64) -> Result<bool, Error> {
    const FIRST: u64 = 1 << 0;
    const SNAPSHOT: u64 = 1 << 1;
    if flags & !(FIRST | SNAPSHOT) != 0 {
        return Err(Error::InvalidParameter);
    }
    if flags & SNAPSHOT != 0 {
        return Err(Error::NoSharedMemory);
    }
    Ok(flags & FIRST != 0)
}

/// Returns the set of counters that `base` and `mask` name, if all of them exist (`counters`). In other extensions a
/// base of all ones means everything; here it does not. An empty set is refused, as OpenSBI and KVM do.
pub fn counter_set(base: u64, mask: u64, counters: u64) -> Result<u64, Error> {
    let base = u32::try_from(base).map_err(|_| Error::InvalidParameter)?;
    match mask.checked_shl(base) {
        Some(set) if set != 0 && set >> base == mask && set & !counters == 0 => Ok(set),
        _ => Err(Error::InvalidParameter),
    }
}

/// Returns the `counter_info` of a hardware counter: its CSR in bits 11..0, and its width minus one in bits 17..12.
pub fn info(csr: u64, width: u32) -> u64 {
    csr | u64::from(width - 1) << 12
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_only_counters_that_exist() {
        let counters = 0b1111_1101;
        for (base, mask, expected) in [
            (0, 1, Ok(1)),
            (0, 0b1111_1101, Ok(counters)),
            (3, 0b101, Ok(0b10_1000)),
            (7, 1, Ok(0x80)),
            // An empty set, `time`, a counter that does not exist, and numbers that no counter can have.
            (0, 0, Err(Error::InvalidParameter)),
            (0, 0b11, Err(Error::InvalidParameter)),
            (1, 1, Err(Error::InvalidParameter)),
            (7, 0b11, Err(Error::InvalidParameter)),
            (1, 1 << 63 | 0b10, Err(Error::InvalidParameter)),
            (63, u64::MAX, Err(Error::InvalidParameter)),
            (64, 1, Err(Error::InvalidParameter)),
            (1 << 32, 1, Err(Error::InvalidParameter)),
            (u64::MAX, 0b10, Err(Error::InvalidParameter)),
            (u64::MAX, u64::MAX, Err(Error::InvalidParameter)),
        ] {
            assert_eq!(counter_set(base, mask, counters), expected, "{base:#x} {mask:#x}");
        }
    }

    #[test]
    fn unknown_flags_are_refused_before_those_of_the_snapshot() {
        assert_eq!([start_flags(0), start_flags(1)], [Ok(false), Ok(true)]);
        assert_eq!(start_flags(2), Err(Error::NoSharedMemory));
        assert_eq!(start_flags(3), Err(Error::NoSharedMemory));
        assert_eq!([stop_flags(4), stop_flags(6), stop_flags(1 << 63)], [Err(Error::InvalidParameter); 3]);
    }
}
