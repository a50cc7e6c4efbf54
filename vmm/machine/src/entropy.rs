//! The host's randomness, for guests.

use rustix::rand::{GetRandomFlags, getrandom};

/// Returns random bytes of the host.
pub fn entropy<const LEN: usize>() -> [u8; LEN] {
    let mut bytes = [0; LEN];
    // `getrandom` does not fail for so few bytes once the host's pool is initialised.
    let _ = getrandom(&mut bytes, GetRandomFlags::empty());
    bytes
}
