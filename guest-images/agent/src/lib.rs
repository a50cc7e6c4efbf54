//! What Tally and the agent in its default guest say to each other.
//!
//! The agent itself is this package's program: it runs a command in the guest, with the command's streams on ports of a
//! virtio console.

pub mod protocol;
