//! What a guest does that was saved, and has been restored now: its clock stood still, and its kernel would draw the
//! same random numbers as in other guests that were restored from the same state.

use std::fs;
use std::io::Result;

use guest_agent::protocol::Restored;

use crate::sys;

/// Sets the clock, and lets the kernel's random generator begin anew.
pub fn catch_up(Restored { time, entropy }: &Restored) -> Result<()> {
    sys::set_clock(*time)?;
    sys::reseed(entropy)
}

/// Gives this guest an ID of the boot that is no other guest's. The kernel keeps its own from the first time that a
/// program has read it, so another file is mounted over it.
pub fn renew_boot_id() -> Result<()> {
    const OWN: &str = "/run/tally-boot-id";
    let id = fs::read("/proc/sys/kernel/random/uuid")?;
    let is_mounted = fs::exists(OWN)?;
    fs::write(OWN, id)?;
    if is_mounted {
        return Ok(());
    }
    sys::mount(c"/run/tally-boot-id", c"/proc/sys/kernel/random/boot_id", c"", libc::MS_BIND)
}
