//! The port I/O and MMIO buses, and the devices on them.
//!
//! A device models registers only. It does not use KVM and starts no threads. If a register access ends the virtual
//! machine, the device returns an [`End`], and the vCPU thread that made the access acts on it.
#![deny(missing_docs)]

mod access;
mod bus;
mod end;
pub mod fs;
mod fw_cfg;
mod interrupt;
pub mod net;
mod power;
mod serial;
mod state;
#[cfg(test)]
mod testing;
pub mod virtio;

pub use access::Access;
pub use bus::{Overlap, PortBus, PortDevice};
pub use end::End;
pub use fw_cfg::FwCfg;
pub use interrupt::Interrupt;
pub use power::{AcpiSleep, DebugExit, ResetOn};
pub use serial::{Serial, SerialError, SerialState};
pub use state::{DeviceError, Mismatch};
