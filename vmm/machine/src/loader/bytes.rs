//! Reads little-endian numbers from untrusted bytes.

fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

/// Returns the 16-bit number at an offset, or `None` if it is out of bounds.
pub fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    field(bytes, at).map(u16::from_le_bytes)
}

/// Returns the 32-bit number at an offset, or `None` if it is out of bounds.
pub fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    field(bytes, at).map(u32::from_le_bytes)
}

/// Returns the 64-bit number at an offset, or `None` if it is out of bounds.
pub fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    field(bytes, at).map(u64::from_le_bytes)
}
