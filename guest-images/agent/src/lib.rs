//! The protocol between Tally and the agent in its default guest.
//!
//! The agent is this package's program. It runs a command in the guest, with the command's streams on ports of a virtio
//! console.

pub mod protocol;
