//! Programs of known length, compiled with this crate, to compare counts with.

/// A loop of 100 million `dec` and `jnz`, and [four more instructions](LOOP_INSTRUCTIONS) around it.
pub const LOOP: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/loop"));
/// How many instructions [`LOOP`] executes in user mode.
pub const LOOP_INSTRUCTIONS: u64 = 200_000_004;
