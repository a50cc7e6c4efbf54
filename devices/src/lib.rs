//! The port I/O and MMIO buses, and the devices on them.
//!
//! A device models registers only. It does not use KVM and starts no threads. If a register access ends the virtual
//! machine, the device returns an [`End`], and the vCPU thread that made the access acts on it.

mod bus;
pub mod fs;
mod fw_cfg;
mod interrupt;
mod power;
mod serial;
pub mod virtio;

pub use bus::{Overlap, PortBus, PortDevice};
pub use fw_cfg::FwCfg;
pub use interrupt::Interrupt;
pub use power::{AcpiSleep, DebugExit, ResetOn};
pub use serial::{Serial, SerialError};

/// Guest access to a file or directory of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// The guest can only read.
    ReadOnly,
    /// The guest can read and write.
    ReadWrite,
}

/// The way in which a guest ended its virtual machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The guest powered off.
    PowerOff,
    /// The guest requested a reset.
    Reboot,
    /// The guest wrote this byte to the debug-exit port.
    DebugExit(u8),
}
