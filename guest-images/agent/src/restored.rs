//! What a guest does that was saved while it waited for its command, and has been restored now: its clock stood still, and its
//! kernel would draw the same random numbers as in other guests that were restored from the same state.

use std::io::Result;

use guest_agent::protocol::Restored;

use crate::sys;

/// Sets the clock, and lets the kernel's random generator begin anew.
pub fn catch_up(Restored { time, entropy }: &Restored) -> Result<()> {
    sys::set_clock(*time)?;
    sys::reseed(entropy)
}
