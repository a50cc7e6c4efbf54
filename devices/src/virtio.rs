//! Virtio devices (OASIS "Virtual I/O Device", version 1.2), with their MMIO transport and their queues.
//!
//! A [`Device`] only processes requests. The guest's driver submits them to [`Queues`] in the guest's memory, which it
//! sets up with the registers of a [`Transport`]. Each device is served on a thread of its own, so that a slow request
//! blocks no vCPU.

use std::os::fd::BorrowedFd;

use rustix::event::PollFlags;

use crate::state::{DeviceError, check};

mod block;
mod buffers;
mod console;
mod fs;
mod mmio;
mod net;
mod queues;
mod saved;
pub mod testing;

pub use block::{Disk, DiskError};
pub use buffers::{Reader, Writer};
pub use console::{Console, ConsoleState};
pub use fs::SharedFolder;
pub use mmio::{MmioBus, Transport, TransportState};
pub use net::{Mac, Net};
pub use queues::{Head, Queues, Request, Room};
pub use saved::{DeviceState, DiskState};

/// The part of a virtio device that is independent of its transport.
pub trait Device: Send {
    /// Returns the device ID (section 5 of the specification).
    fn id(&self) -> u32;
    /// Returns the feature bits specific to this type of device.
    fn features(&self) -> u64 {
        0
    }
    /// Returns the device configuration space. It changes only by [`Queues::set_config`].
    fn config(&self) -> Vec<u8> {
        Vec::new()
    }
    /// Returns the maximum size of each queue, in entries.
    fn queue_sizes(&self) -> Vec<u16>;
    /// Processes the requests in the queues.
    fn serve(&mut self, queues: &mut Queues);
    /// Returns what else there is to wait for before the device is to be served again, beside its driver.
    fn awaits(&self) -> Vec<(BorrowedFd<'_>, PollFlags)> {
        Vec::new()
    }
    /// Drops all state that belongs to the driver, after the driver has reset the device.
    fn reset(&mut self) {}
    /// Returns what the device knows beyond its registers and queues, for a snapshot. It processes no request
    /// meanwhile.
    fn save(&mut self) -> Result<Option<DeviceState>, DeviceError> {
        Ok(None)
    }
    /// Restores what another device of this kind has saved.
    fn restore(&mut self, saved: Option<&DeviceState>) -> Result<(), DeviceError> {
        Ok(check(saved.is_none(), "state")?)
    }
}
