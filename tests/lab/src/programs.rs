//! Programs of known length, compiled with this crate, to compare counts with.

/// A Linux program: a loop of 100 million `dec` and `jnz`, and four more instructions around it.
pub const LOOP: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/loop"));
/// How many instructions [`LOOP`] executes in user mode.
pub const LOOP_INSTRUCTIONS: u64 = 200_000_004;
/// How many of them are conditional branches. One of these is predicted wrongly, the last.
pub const LOOP_CONDITIONAL_BRANCHES: u64 = 100_000_000;
/// How many of them are branches of any kind: the system call that ends it is one.
pub const LOOP_BRANCHES: u64 = LOOP_CONDITIONAL_BRANCHES + 1;

/// A firmware image that is all of a guest. It loops in user mode and ends with a write to port 0xf4.
pub const GUEST_LOOP_ROM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/guest-loop.rom"));
/// How many instructions [`GUEST_LOOP_ROM`] executes in user mode.
pub const GUEST_LOOP_INSTRUCTIONS: u64 = 100_000_002;

/// The programs of `cpu/programs.S`, which end soon and whose counts `cpu/README.md` lists.
pub const KNOWN: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/programs.rs"));
