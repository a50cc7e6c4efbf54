//! Virtio devices (OASIS "Virtual I/O Device", version 1.2): what each does, and what all have alike.
//!
//! A [`Device`] knows requests and nothing else. Its driver puts them into [`Queues`], in the guest's memory, by way of
//! the registers of a [`Transport`]. Whoever owns the device serves it on a thread of its own, so that a request that
//! takes its time stops no vCPU.

mod block;
mod console;
mod fs;
mod mmio;
mod queues;
#[cfg(test)]
mod testing;

pub use block::{Disk, DiskError};
pub use console::Console;
pub use fs::SharedFolder;
pub use mmio::{MmioBus, Transport};
pub use queues::{Head, Queues, Request};

/// What a device does, beneath its registers.
pub trait Device: Send {
    /// What kind it is (section 5 of the specification).
    fn id(&self) -> u32;
    /// Its own feature bits, beside those that every device has.
    fn features(&self) -> u64 {
        0
    }
    /// Its configuration space, which does not change.
    fn config(&self) -> Vec<u8> {
        Vec::new()
    }
    /// How many entries each of its queues has at most.
    fn queues(&self) -> Vec<u16>;
    /// Does what the driver asks for.
    fn serve(&mut self, queues: &mut Queues);
    /// Forgets the driver, which begins anew.
    fn reset(&mut self) {}
}
